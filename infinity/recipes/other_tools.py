"""Configuration files of other tools as recipes: for each tool a table from its keys to a recipe's.

A row says which key of a recipe has the same meaning, and how the value is converted; or that nothing has to
be said here (``Needless``), or that nothing can be (``Missing``), and why. It covers the keys below its own.
Values are converted by the recipe's key, in every tool alike, or by what else a key means (``_MEANINGS``).
The same rows give the hint in an error about an unknown key of a recipe.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from infinity.core.config import SettingError
from infinity.optim.rules import find_rule


class Needless(NamedTuple):
    """A key that a recipe does not need."""

    why: str


class Missing(NamedTuple):
    """A key, or a value of it, that no recipe can say."""

    why: str


UNKNOWN = Missing("no key here has this meaning")
Values: TypeAlias = dict[str, Any]
#: Gives a value of a recipe's key, or several by their keys.
Convert: TypeAlias = Callable[[Any], Any]


class To(NamedTuple):
    """A recipe's key, and its value; for several keys it is the nearest one, and the values are by key."""

    key: str
    convert: Convert = lambda value: value


Row: TypeAlias = To | Needless | Missing

_SHARDED = Needless("weights, gradients and states are always sharded over ranks")
_BUDGETS = Needless("buffers follow from memory.device, memory.host and memory.nvme")
_CHOSEN = Needless("memory.activations=auto keeps, stores or recomputes activations, as is fastest")
_WORKERS = Needless("tokens are cached in data.cache, and read while the device computes")
_COMMITTED = Needless("every step is committed, and an interrupted run goes on by itself")
_COMPILED = Missing("models are not compiled by torch.compile; updates always are")
_DTYPES = Missing("train.dtype is bf16, fp16 or fp32")
_SINKS = "tensorboard", "wandb", "mlflow"
_TRACKERS = Missing("what there is: observe.tensorboard, observe.wandb and observe.mlflow")


def _among(key: str, accepted: str, **known: str) -> Convert:
    """Return what takes the names of ``accepted``, and those that are ``known`` for one of them."""

    def convert(name: Any) -> Any:
        found = known.get(str(name).lower().rpartition(".")[2], name)
        if found in accepted.split():
            return found
        return Missing(f"{key} is one of {', '.join(accepted.split())}, not {name}")

    return convert


def _optimizer(name: Any) -> Any:
    """Return the update rule of a name such as ``paged_adamw_8bit`` or ``torch.optim.AdamW``."""
    plain = re.sub(
        r"paged|torch|fused|apex|anyprecision|bnb|32bit|npu|xla|[-_]", "", str(name).lower().split(".")[-1]
    )
    if str(name).lower() == "torch.optim.adafactor":
        return Missing("optim.name=adafactor is that of transformers: torch's scales its rate by the weights")
    try:
        return find_rule("schedulefree" if plain == "schedulefreeadamw" else plain).name
    except SettingError as error:
        return Missing(f"optim.name: got {name}; wanted {error.wanted}")


def _dtype(name: str) -> Convert:
    return lambda on: "auto" if on == "auto" else name if _is_on(on) else {}


def _seed(seed: Any) -> Values:
    return {"run.seed": seed, "data.seed": seed}


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", True) if isinstance(value, Mapping) else value)


def _positive(value: Any) -> Any:
    """Return a count, of which 0 and less mean none."""
    return value if isinstance(value, int | float) and value > 0 else {}


def _warmup(value: Any) -> Any:
    return {"optim.warmup_ratio": value} if isinstance(value, float) and 0 < value < 1 else int(value)


def _steps(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return f"{value} steps"
    return Missing("checkpoint.every takes steps or a time, such as '500 steps' or 2h") if value else {}


def _every(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return value
    return Missing("it is a number of steps here") if value else {}


def _texts(value: Any) -> Any:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return {} if names in (["all"], ["all-linear"], None) else names


def _fraction(value: Any) -> Any:
    if isinstance(value, int | float) and 0 <= value < 1:
        return float(value)
    return Missing("data.eval_fraction is a share of the data, not a number of rows")


def _reports(value: Any) -> Any:
    names = {value} if isinstance(value, str) else set(value or ())
    if names - {*_SINKS, "none"}:
        return _TRACKERS
    return {f"observe.{name}": True for name in _SINKS if name in names}


def _tracker(sink: str, variable: str) -> To:
    """Return the row of a project's name, which the tracker takes from the environment."""
    key = f"observe.{sink}"
    return To(
        key,
        lambda name: {key: True, "_said": {"": Missing(f"set {variable}={name} in the environment")}},
    )


def _axolotl_data(key: str) -> Convert:
    """Return what converts a list of data sets, each with a path and a type."""

    def convert(given: Any) -> Any:
        files, formats, fields, said = list[str](), set[str](), dict[str, str](), dict[str, Row]()
        for each in given if isinstance(given, list) else [given]:
            each = {"path": each} if isinstance(each, str) else dict(each)
            path, found = each.pop("path", None), each.pop("data_files", None)
            files += [name] if isinstance(name := found or path, str) else list(name or ())
            if isinstance(kind := each.pop("type", None), Mapping):  # of a prompt of its own the columns
                each, kind = each | dict(kind), "alpaca"
            formats.add(_AXOLOTL_TYPES.get(str(kind).partition(".")[0], "auto"))
            columns = {name: each.pop(name, None) for name in _AXOLOTL_FIELDS}
            fields |= {_AXOLOTL_FIELDS[name]: column for name, column in columns.items() if column}
            left = [name for name, value in each.items() if value and (name, value) != ("split", "train")]
            said |= {name: _OF_A_DATA_SET.get(name, UNKNOWN) for name in left}
        changed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
        values: Values = {key: files, "_said": said}
        if key == "data.files":  # which says it for all data
            values |= {"data.fields": changed} if changed else {}
            values |= {"data.format": formats.pop()} if len(formats) == 1 else {}
        return values

    return convert


SPLIT = Missing("files are read whole: give those of this part")
#: What is beside the path, the type and the columns of a data set.
_OF_A_DATA_SET: dict[str, "Row"] = {
    "split": SPLIT,
    "ds_type": Needless("the suffix of a file says how it is read"),
    "chat_template": Needless("chats are rendered with the checkpoint's own template"),
}


_AXOLOTL_TYPES = {"alpaca": "alpaca", "alpaca_chat": "alpaca", "sharegpt": "sharegpt", "completion": "text"}
_AXOLOTL_FIELDS = {
    "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "field_system": "system", "field_messages": "messages", "field": "text",
}  # fmt: skip


#: What keys of tools mean, where values are converted: a recipe's key, or (with _ in front) something else.
_MEANINGS: dict[str, "Row"] = {
    **{each.key: each for each in (
        To("checkpoint.every", _steps), To("data.eval_files", _texts), To("data.eval_fraction", _fraction),
        To("data.files", _texts), To("data.packing", bool), To("lora.modules_to_save", _texts),
        To("lora.target_modules", _texts), To("memory.nvme", _texts), To("observe.mlflow", _is_on),
        To("observe.tensorboard", _is_on), To("observe.wandb", _is_on),
        To("optim.max_grad_norm", lambda norm: norm or None),  # 0 never clips
        To("optim.name", _optimizer), To("optim.warmup_steps", _warmup), To("run.seed", _seed),
        To("train.device", lambda name: name if name == "cpu" else {}), To("train.epochs", _positive),
        To("train.eval_every", _every), To("train.log_every", _every), To("train.patience", _positive),
        To("train.steps", _positive),
        To("optim.schedule", _among(
            "optim.schedule", "constant cosine linear", constant_with_warmup="constant", warmuplr="constant",
            warmupdecaylr="linear", cosine_with_min_lr="cosine", warmupcosinelr="cosine",
            cosineannealinglr="cosine", get_cosine_schedule_with_warmup="cosine",
        )),
        To("partition.reduce_dtype", lambda name: "fp32" if name in ("fp32", "float32") else "compute"),
        To("train.dtype", _among(
            "train.dtype", "bf16 fp16 fp32", no="fp32", bfloat16="bf16", float16="fp16", float32="fp32"
        )),
        To("train.task", _among("train.task", "sft pretrain dpo kto reward", pt="pretrain", rm="reward")),
    )},
    "_all_tokens": To("train.task", lambda on: "pretrain" if on else {}),
    "_beta1": To("optim.betas", lambda beta: {"_beta1": beta}),
    "_beta2": To("optim.betas", lambda beta: {"_beta2": beta}),
    "_bf16": To("train.dtype", _dtype("bf16")),
    "_fp16": To("train.dtype", _dtype("fp16")),
    "_cpu": To("train.device", lambda on: "cpu" if on else {}),
    "_eval": To("", lambda name: {"_eval": name}),
    "_save": To("", lambda name: {"_save": name}),
    "_a_file": Missing("it is a file of its own: infinity recipe --from FILE"),
    "_batch": Missing("it is train.batch_size x train.accumulate x ranks here"),
}  # fmt: skip


def _to(pairs: str) -> dict[str, "Row"]:
    """Return rows of pairs such as ``lora_r=lora.rank``, the tool's key and the recipe's, or a meaning."""
    named = (pair.split("=") for pair in pairs.split())
    return {theirs: _MEANINGS.get(meaning) or To(meaning) for theirs, meaning in named}


def _each(names: str, row: "Row") -> dict[str, "Row"]:
    return dict.fromkeys(names.split(), row)


#: Keys that transformers' ``TrainingArguments`` has, and so Axolotl and LLaMA-Factory.
_TRAINER: dict[str, Row] = {
    **_to("""
        output_dir=run.dir run_name=run.name seed=run.seed data_seed=data.seed use_cpu=_cpu bf16=_bf16
        pure_bf16=_bf16 fp16=_fp16 per_device_train_batch_size=train.batch_size
        gradient_accumulation_steps=train.accumulate max_steps=train.steps num_train_epochs=train.epochs
        logging_steps=train.log_every learning_rate=optim.lr lr_scheduler_type=optim.schedule
        lr_scheduler_kwargs.min_lr_rate=optim.min_lr_ratio warmup_steps=optim.warmup_steps
        warmup_ratio=optim.warmup_ratio weight_decay=optim.weight_decay max_grad_norm=optim.max_grad_norm
        optim=optim.name adam_beta1=_beta1 adam_beta2=_beta2 adam_epsilon=optim.eps
        eval_strategy=_eval evaluation_strategy=_eval eval_steps=train.eval_every
        eval_on_start=train.eval_first early_stopping_patience=train.patience
        save_strategy=_save save_steps=checkpoint.every save_total_limit=checkpoint.keep deepspeed=_a_file
    """),
    "report_to": To("observe.tensorboard", _reports),
    "load_best_model_at_end": To("train.keep_best", lambda on: "loss" if on else {}),
    "metric_for_best_model": To("train.keep_best", lambda name: str(name).removeprefix("eval_")),
    "tf32": _DTYPES,
    **_each("bf16_full_eval fp16_full_eval", Needless("evaluations compute in train.dtype, as steps do")),
    **_each("gradient_checkpointing activation_checkpointing", _CHOSEN),
    "fsdp": _SHARDED,
    **_each("resume_from_checkpoint save_only_model", _COMMITTED),
    "torch_compile": _COMPILED,
    "neftune_noise_alpha": Missing("there is no noise on embeddings"),
    "optim_args": Missing("optim.options has the numbers of a rule"),
    "label_smoothing_factor": Missing("the loss is the plain cross entropy"),
    **_each("push_to_hub hub_model_id", Missing("nothing is uploaded: infinity export, and hf upload")),
    "use_liger_kernel": Needless("logits are computed in slices where they are large (memory.logits)"),
    **_each(
        """
        do_train do_eval do_predict overwrite_output_dir logging_strategy logging_first_step log_level
        per_device_eval_batch_size prediction_loss_only remove_unused_columns fsdp_config ddp_timeout
        ddp_find_unused_parameters ddp_backend save_safetensors accelerator_config
        average_tokens_across_devices gradient_checkpointing_kwargs local_rank disable_tqdm
        log_level_replica log_on_each_node logging_nan_inf_filter eval_do_concat_batches eval_delay
        hub_strategy hub_token include_for_metrics restore_callback_states_from_checkpoint
        include_num_input_tokens_seen length_column_name train_sampling_strategy skip_memory_metrics
        save_on_each_node project trackio_space_id dataloader_drop_last debug
        """,
        Needless("it changes no number here"),
    ),
    **_each(
        """
        dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_in_order
        dataloader_persistent_workers preprocessing_num_workers dataset_processes overwrite_cache
        dataset_prepared_path
        """,
        _WORKERS,
    ),
}
#: Keys that both Axolotl and LLaMA-Factory have.
_FINETUNING: dict[str, Row] = _TRAINER | {
    **_to("""
        lora_r=lora.rank lora_rank=lora.rank lora_alpha=lora.alpha lora_dropout=lora.dropout
        lora_modules_to_save=lora.modules_to_save additional_target=lora.modules_to_save
        lora_target_modules=lora.target_modules lora_target=lora.target_modules use_rslora=lora.rslora
        peft_use_rslora=lora.rslora use_dora=lora.dora peft_use_dora=lora.dora
        loraplus_lr_ratio=lora.lr_ratio streaming=data.streaming
    """),
    **_each(
        "buffer_size streaming_multipack_buffer_size shuffle_buffer_size",
        Missing("data.shuffle_buffer is a size of files, not a number of rows"),
    ),
    "lora_target_linear": To("lora.target_modules", lambda on: {"_linear": bool(on)}),
    "trust_remote_code": Missing("no code of a checkpoint is run"),
    **_each("chat_template template", Missing("chats are rendered with the checkpoint's own chat template")),
    **_each(
        "flash_attention flash_attn attn_implementation sdp_attention xformers_attention",
        Missing("attention is that of the checkpoint's config.json"),
    ),
}

_TRAINER_DEFAULTS: Values = {
    "optim.lr": 5e-5, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0, "optim.schedule": "linear",
    "optim.min_lr_ratio": 0.0, "train.batch_size": 8, "train.epochs": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A tool's rows, keys that only its files have, and what its defaults are where a recipe's differ."""

    marks: frozenset[str]
    rows: Mapping[str, Row]
    defaults: Values = field(default_factory=dict)


_MOMENTUM = To("optim.options", lambda momentum: {"optim.options": {"momentum": momentum}})
_DEEPSPEED: dict[str, Row] = {
    **_to("""
        train_micro_batch_size_per_gpu=train.batch_size gradient_accumulation_steps=train.accumulate
        train_batch_size=_batch steps_per_print=train.log_every gradient_clipping=optim.max_grad_norm
        optimizer.params.lr=optim.lr optimizer.params.betas=optim.betas optimizer.params.eps=optim.eps
        optimizer.params.weight_decay=optim.weight_decay scheduler.type=optim.schedule
        scheduler.params.warmup_max_lr=optim.lr scheduler.params.warmup_num_steps=optim.warmup_steps
        scheduler.params.total_num_steps=train.steps scheduler.params.cos_min_ratio=optim.min_lr_ratio
        zero_optimization.offload_param.nvme_path=memory.nvme
        zero_optimization.offload_optimizer.nvme_path=memory.nvme bf16=_bf16 bfloat16=_bf16 fp16=_fp16
        communication_data_type=partition.reduce_dtype tensorboard=observe.tensorboard
        wandb=observe.wandb wall_clock_breakdown=observe.timeline
    """),
    "fp16.initial_scale_power": To("optim.loss_scale", lambda power: 2.0**power),
    "optimizer.type": To(
        "optim.name",  # whose Adam decouples the decay, too
        lambda name: _optimizer("adamw" if str(name).lower() == "adam" else name),
    ),
    "optimizer.params.momentum": _MOMENTUM,
    "scheduler.params": Needless("the rate rises from 0"),
    **_each(
        "zero_optimization.offload_param zero_optimization.offload_optimizer zero_optimization", _BUDGETS
    ),
    "zero_optimization.stage": _SHARDED,
    "aio": Needless("I/O engine and queues are chosen by the machine (memory.engine)"),
    "activation_checkpointing": _CHOSEN,
    "data_types": Needless("gradients are summed in fp32 (partition.reduce_dtype)"),
    "zero_allow_untested_optimizer": Needless("optim.name says the optimizer"),
    "zero_force_ds_cpu_optimizer": Needless("updates run where they are faster (memory.updates)"),
}

_ACCELERATE: dict[str, Row] = {
    **_to("""
        gradient_accumulation_steps=train.accumulate gradient_clipping=optim.max_grad_norm
        deepspeed_config.gradient_accumulation_steps=train.accumulate
        deepspeed_config.gradient_clipping=optim.max_grad_norm
        deepspeed_config.offload_param_nvme_path=memory.nvme
        deepspeed_config.offload_optimizer_nvme_path=memory.nvme
        deepspeed_config.deepspeed_config_file=_a_file mixed_precision=train.dtype use_cpu=_cpu
    """),
    **_each("deepspeed_config fsdp_config.fsdp_offload_params", _BUDGETS),
    "fsdp_config.fsdp_activation_checkpointing": _CHOSEN,
    **_each("fsdp_config distributed_type", _SHARDED),
    **_each(
        "num_processes num_machines",
        Missing("the launcher says it: torchrun --nproc-per-node N --nnodes M -m infinity train RECIPE"),
    ),
    **_each(
        "machine_rank main_process_ip main_process_port main_training_function rdzv_backend "
        "same_network compute_environment gpu_ids debug downcast_bf16 enable_cpu_affinity",
        Needless("torchrun, or the device, says it"),
    ),
    "dynamo_config": _COMPILED,
}

_AXOLOTL: dict[str, Row] = _FINETUNING | {
    **_to("""
        base_model=model.path tokenizer_config=data.tokenizer sequence_len=model.seq_len
        num_labels=model.num_labels val_set_size=data.eval_fraction sample_packing=data.packing
        shuffle_merged_datasets=data.shuffle micro_batch_size=train.batch_size num_epochs=train.epochs
        train_on_inputs=_all_tokens optimizer=optim.name lr_scheduler=optim.schedule
        cosine_min_lr_ratio=optim.min_lr_ratio lora_model_dir=lora.adapter rl=train.task
        rl_beta=train.beta kto_desirable_weight=train.desirable_weight
        kto_undesirable_weight=train.undesirable_weight
    """),
    **_each("datasets pretraining_dataset", To("data.files", _axolotl_data("data.files"))),
    "test_datasets": To("data.eval_files", _axolotl_data("data.eval_files")),
    "adapter": To(
        "", lambda name: {"_lora": bool(name)} | ({"_stored_as": "nf4"} if name == "qlora" else {})
    ),
    "load_in_4bit": To("model.stored_as", lambda on: {"_stored_as": "nf4"} if on else {}),
    "load_in_8bit": To("model.stored_as", lambda on: {"_stored_as": "int8"} if on else {}),
    "reward_model": To("train.task", lambda on: "reward" if on else {}),
    "wandb_project": _tracker("wandb", "WANDB_PROJECT"),
    "mlflow_experiment_name": _tracker("mlflow", "MLFLOW_EXPERIMENT_NAME"),
    **_each("special_tokens tokens", Missing("tokens are those of the tokenizer's own files")),
    "evals_per_epoch": To("train.evals_per_epoch", _positive),
    "saves_per_epoch": Missing("checkpoint.every is a number of steps, or a time"),
    "plugins": Missing("there are no plugins"),
    **_each(
        "pad_to_sequence_len group_by_length eval_sample_packing model_type tokenizer_type strict "
        "is_llama_derived_model lora_fan_in_fan_out excess_length_strategy",
        Needless("it follows from the checkpoint and data.packing"),
    ),
}

_LLAMA_FACTORY: dict[str, Row] = _FINETUNING | {
    **_to("""
        model_name_or_path=model.path adapter_name_or_path=lora.adapter cutoff_len=model.seq_len
        packing=data.packing eval_dataset=data.eval_files val_size=data.eval_fraction stage=train.task
        train_on_prompt=_all_tokens pref_beta=train.beta kto_chosen_weight=train.desirable_weight
        kto_rejected_weight=train.undesirable_weight
    """),
    "dataset": To("data.files", lambda names: {"_names": _texts(names)}),
    "dataset_dir": To("data.files", lambda folder: {"_names_in": folder}),
    "use_muon": To("optim.name", lambda on: {"_rule": "muon"} if on else {}),  # whatever optim says
    "pref_loss": To(
        "",
        lambda name: Needless("it is that of dpo") if name == "sigmoid" else Missing("dpo has the sigmoid"),
    ),
    "finetuning_type": To(
        "",
        lambda name: (
            {"_lora": name == "lora"} if name in ("lora", "full") else Missing("lora or all weights")
        ),
    ),
    "neat_packing": To("data.packing", lambda on: True if on else {}),
    "interleave_probs": To(
        "data.weights", lambda text: [float(each) for each in str(text).split(",")] if text else {}
    ),
    "quantization_bit": To(
        "model.stored_as",
        lambda bits: {"_stored_as": {4: "nf4", 8: "int8"}[bits]} if bits in (4, 8) else Missing("4 or 8"),
    ),
    "ref_model": Missing("the reference is the model before its first step"),
    "mix_strategy": Needless("data.weights mixes; without, every sequence comes once an epoch"),
    "quantization_method": Needless("model.stored_as is nf4 or int8, as bitsandbytes and compressed-tensors"),
    "mask_history": Missing("all answers of a chat count in the loss"),
    "max_samples": Missing("all rows are read: give a smaller file"),
    "plot_loss": Needless("metrics.jsonl has the losses (observe.metrics)"),
}

#: Columns of torchtune's input and output data.
_OF_TUNE: dict[str, str] = {"input": "prompt", "output": "completion"}
_TORCHTUNE: dict[str, Row] = {
    **_to("""
        output_dir=run.dir seed=run.seed device=train.device dtype=train.dtype batch_size=train.batch_size
        epochs=train.epochs gradient_accumulation_steps=train.accumulate
        log_every_n_steps=train.log_every checkpointer.checkpoint_dir=model.path
        tokenizer.max_seq_len=model.seq_len dataset.packed=data.packing dataset.data_files=data.files
        dataset.train_on_input=_all_tokens shuffle=data.shuffle clip_grad_norm=optim.max_grad_norm
        optimizer._component_=optim.name optimizer.lr=optim.lr optimizer.betas=optim.betas
        optimizer.eps=optim.eps optimizer.weight_decay=optim.weight_decay
        lr_scheduler._component_=optim.schedule lr_scheduler.num_warmup_steps=optim.warmup_steps
        model.lora_alpha=lora.alpha model.lora_dropout=lora.dropout model.use_dora=lora.dora
    """),
    "model.lora_rank": To("lora.rank", lambda rank: {"lora.rank": rank, "_lora": True}),
    "model.lora_attn_modules": To(
        "lora.target_modules", lambda names: [{"output_proj": "o_proj"}.get(name, name) for name in names]
    ),
    "dataset.source": To("data.files", lambda name: {} if name in ("json", "csv", "parquet") else [name]),
    "dataset.column_map": To("data.fields", lambda names: {_OF_TUNE.get(k, k): v for k, v in names.items()}),
    "dataset.split": To("", lambda part: {} if part == "train" else SPLIT),
    "checkpointer": Needless("model.path says it"),
    "tokenizer": Needless("the tokenizer is that of model.path"),
    "dataset": Needless("data.files and the columns of rows say it"),
    "max_steps_per_epoch": Missing("train.steps counts the steps of the whole run"),
    "optimizer.fused": Needless("updates are fused"),
    "optimizer.momentum": _MOMENTUM,
    "model.apply_lora_to_mlp": Missing("lora.target_modules lists all layers: add up_proj and so on"),
    "model": Needless("model.path has the architecture"),
    **_each("enable_activation_checkpointing enable_activation_offloading", _CHOSEN),
    "compile": _COMPILED,
    "resume_from_checkpoint": _COMMITTED,
    **_each(
        "loss metric_logger log_peak_memory_stats profiler optimizer_in_bwd log_level "
        "fsdp_cpu_offload fsdp_sharding_strategy save_adapter_weights_only dataset_val",
        Needless("it changes no number here"),
    ),
}

_TORCHTITAN: dict[str, Row] = {
    **_to("""
        job.dump_folder=run.dir model.hf_assets_path=model.path training.seed=run.seed
        training.local_batch_size=train.batch_size training.batch_size=train.batch_size
        training.global_batch_size=_batch training.seq_len=model.seq_len training.steps=train.steps
        training.max_norm=optim.max_grad_norm training.dataset_path=data.files
        training.mixed_precision_param=train.dtype training.mixed_precision_reduce=partition.reduce_dtype
        optimizer.name=optim.name optimizer.lr=optim.lr optimizer.beta1=_beta1 optimizer.beta2=_beta2
        optimizer.eps=optim.eps optimizer.weight_decay=optim.weight_decay
        lr_scheduler.decay_type=optim.schedule lr_scheduler.warmup_steps=optim.warmup_steps
        lr_scheduler.min_lr_factor=optim.min_lr_ratio checkpoint.interval=checkpoint.every
        metrics.log_freq=train.log_every metrics.enable_tensorboard=observe.tensorboard
        metrics.enable_wandb=observe.wandb
    """),
    "checkpoint.keep_latest_k": To("checkpoint.keep", _positive),
    "job": Needless("run.name says it"),
    "model": Missing("the model is a checkpoint's (model.path), or a GPT of the sizes in section model"),
    "optimizer": Needless("updates are fused"),
    "lr_scheduler.decay_ratio": Missing("the rate decays from the end of the warm-up to the last step"),
    "training.dataset": Missing("it names a data set of the tool: give its files in data.files"),
    **_each("training.compile compile", _COMPILED),
    "checkpoint": Needless("every step is committed; checkpoint.every writes portable checkpoints beside"),
    "activation_checkpoint": _CHOSEN,
    "parallelism": Missing("ranks share all weights and split the batch; there is no other parallelism"),
    **_each("float8 quantize", _DTYPES),
    "metrics": Needless("metrics.jsonl is in the run's folder"),
    "profiling": Needless("observe.timeline writes a trace"),
    "comm": Needless("partition.timeout_s is the time limit of ranks"),
    "validation": Missing("train.eval_every, data.eval_files and data.eval_fraction evaluate"),
}

#: The tools, of whose marks a file has one; of several, the tool is that of which it has the most keys.
TOOLS = {
    "DeepSpeed": Tool(
        frozenset({
            "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
            "bf16", "fp16", "aio", "activation_checkpointing", "wall_clock_breakdown",
        }),
        _DEEPSPEED,
        {"optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0, "optim.min_lr_ratio": 0.0,
         "optim.max_grad_norm": None},
    ),
    "Accelerate": Tool(
        frozenset({"compute_environment", "distributed_type", "fsdp_config", "mixed_precision"}), _ACCELERATE
    ),
    "Axolotl": Tool(
        frozenset({"micro_batch_size", "sequence_len", "sample_packing", "val_set_size"}),
        _AXOLOTL,
        _TRAINER_DEFAULTS | {"optim.schedule": "cosine", "train.batch_size": 1, "train.epochs": 1.0,
                             "model.seq_len": 512, "data.eval_fraction": 0.0},
    ),
    "LLaMA-Factory": Tool(
        frozenset({"finetuning_type", "cutoff_len"}), _LLAMA_FACTORY,
        _TRAINER_DEFAULTS | {"model.seq_len": 2048, "data.eval_fraction": 0.0, "_eval": "no", "_lora": True},
    ),
    "transformers' TrainingArguments": Tool(
        frozenset({"per_device_train_batch_size", "num_train_epochs"}), _TRAINER,
        _TRAINER_DEFAULTS | {"_eval": "no"},
    ),
    "torchtune": Tool(
        frozenset({"checkpointer"}), _TORCHTUNE,
        {"optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01, "optim.max_grad_norm": None,
         "optim.min_lr_ratio": 0.0, "train.epochs": 1.0, "data.eval_fraction": 0.0},
    ),
    "torchtitan": Tool(
        frozenset({"job", "parallelism", "activation_checkpoint"}), _TORCHTITAN,
        {"optim.lr": 8e-4, "optim.betas": [0.9, 0.95], "optim.schedule": "linear",
         "optim.warmup_steps": 200, "optim.min_lr_ratio": 0.0,
         "train.steps": 10_000, "model.seq_len": 2048, "data.eval_fraction": 0.0},
    ),
}  # fmt: skip

#: The key of a recipe by its name in any tool.
KNOWN_AS = {
    name.rpartition(".")[2]: row.key
    for tool in TOOLS.values()
    for name, row in tool.rows.items()
    if isinstance(row, To) and row.key
}


def tool_of(given: Mapping[str, Any]) -> str:
    """Return the name of the tool whose configuration this is; empty: of none of them."""
    known = {
        name: sum(key in tool.rows or any(each.startswith(f"{key}.") for each in tool.rows) for key in given)
        for name, tool in TOOLS.items()
        if tool.marks & given.keys()
    }
    return max(known, key=lambda name: known[name], default="")


def near(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a question that suggests a key in place of an unknown one; empty: none is near."""
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    near = (
        [other for other in known if other.endswith(f".{name}")]
        or [other for other in known if other == KNOWN_AS.get(name or key)]
        or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
        or difflib.get_close_matches(key, [] if siblings else [*known, *sections], n=1, cutoff=0.6)
    )
    return f"did you mean {near[0]}?" if near else ""
