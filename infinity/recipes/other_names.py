"""Names that keys of a recipe have in other tools, for errors about unknown keys."""

#: A key of a recipe, by its name elsewhere.
KNOWN_AS = {
    name: key
    for key, names in {
        "model.path": "base_model model_name_or_path model_name pretrained_model_name_or_path",
        "model.seq_len": "sequence_len max_seq_length max_seq_len max_length cutoff_len block_size",
        "data.files": "datasets dataset dataset_path train_file dataset_dir",
        "data.packing": "sample_packing packed",
        "data.eval_fraction": "val_set_size val_size",
        "optim.lr": "learning_rate",
        "optim.schedule": "lr_scheduler lr_scheduler_type",
        "optim.warmup_steps": "num_warmup_steps warmup_ratio",
        "optim.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad_norm",
        "optim.betas": "adam_beta1 adam_beta2",
        "optim.eps": "adam_epsilon",
        "train.steps": "max_steps num_train_epochs num_epochs epochs",
        "train.batch_size": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
        "train.accumulate": "gradient_accumulation_steps",
        "train.dtype": "bf16 fp16 torch_dtype mixed_precision precision",
        "train.eval_every": "eval_steps eval_interval",
        "train.log_every": "logging_steps log_interval",
        "checkpoint.every": "save_steps save_interval",
        "checkpoint.keep": "save_total_limit",
        "run.dir": "output_dir out_dir",
        "lora.rank": "lora_r r lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.target_modules": "lora_target_modules lora_target lora_target_linear",
        "memory.activations": "gradient_checkpointing activation_checkpointing",
        "model.stored_as": "load_in_4bit load_in_8bit",
    }.items()
    for name in names.split()
}
