"""What is trained on accelerators, real or simulated: models, places of states, ways to train."""

from tests.accelerator.harness import DEVICE, HOST, NVME, Scenario

TIGHT, NODES = ("memory.device=64KiB",), "partition.ranks_per_node=2"
SHARED = "memory.shared=always"
STAGED = (SHARED, "train.schedule=layer", "train.stages=true")
#: Gradients that wait for ``step()`` do not fit host memory.
SMALL = ("memory.nvme=[{folder}]", "memory.host=200KiB", "memory.resident=false", "memory.engine=threads")

#: The few that the fast suite runs: together they take every path between device, host and disk.
FAST: dict[str, Scenario] = {
    "llama on nvme": Scenario(more=TIGHT, steps=2),
    "gpt in host memory, clipped": Scenario(model="gpt", place=HOST, clip=1.0, steps=2),
    "two ranks, accumulated": Scenario(accumulate=2, world=2, steps=2, clip=1.0),
    "llama, accumulated on nvme": Scenario(place=SMALL, more=TIGHT, accumulate=2, steps=2, clip=1.0),
    "on the device, clipped": Scenario(place=DEVICE, clip=1.0, steps=2),
}

SLOW: dict[str, Scenario] = {
    "gpt2 with activations stored": Scenario(
        model="gpt2", more=("memory.activations=offload",), clip=1.0, steps=2
    ),
    "quantized base": Scenario(base="qwen3_fp8", lora=4, steps=2),
    "llama on nvme, more steps": Scenario(more=TIGHT, steps=6),
    "llama on nvme, clipped": Scenario(clip=1.0, more=("memory.device=192KiB",)),
    "llama in host memory": Scenario(place=HOST),
    "llama, gradients on nvme": Scenario(place=SMALL, clip=1e6),
    "llama, gradients on nvme, rolled back and held": Scenario(place=SMALL, clip=1e-3, steps=4),
    "two ranks, gradients on nvme": Scenario(place=SMALL, clip=1.0, accumulate=2, world=2),
    "llama, one version": Scenario(more=("memory.versions=1",)),
    "llama, one version, clipped": Scenario(more=("memory.versions=1",), clip=1.0),
    "llama resident in part": Scenario(
        place=(
            "memory.nvme=[{folder}]",
            "memory.host=500KiB",
            "memory.resident=true",
            "memory.engine=threads",
        ),
        clip=1.0,
    ),
    "llama with the fastest engine of this machine": Scenario(place=(*NVME[:-1], "memory.engine=auto")),
    "muon on nvme": Scenario(update="muon", more=TIGHT),
    "muon in host memory, clipped": Scenario(update="muon", place=HOST, clip=1.0),
    "muon on the device, clipped": Scenario(update="muon", place=DEVICE, clip=1.0),
    "muon on two ranks": Scenario(update="muon", place=DEVICE, clip=1.0, world=2, steps=2),
    "adafactor on nvme": Scenario(update="adafactor", steps=2),
    "adafactor in host memory, clipped": Scenario(update="adafactor", place=HOST, clip=1.0, steps=2),
    "adafactor on two ranks": Scenario(update="adafactor", place=DEVICE, clip=1.0, world=2, steps=2),
    "apollo-mini on nvme, clipped": Scenario(update="apollo-mini", clip=1.0, steps=2),
    "apollo on two ranks": Scenario(update="apollo+rank=4", place=DEVICE, clip=1.0, world=2, steps=2),
    "galore on the device, clipped": Scenario(update="galore+rank=4", place=DEVICE, clip=1.0, steps=2),
    "soap in host memory": Scenario(update="soap", place=HOST, steps=3),
    "schedule-free on the device, clipped": Scenario(update="schedulefree", place=DEVICE, clip=1.0, steps=2),
    "llama in fp32": Scenario(dtype="fp32", clip=1.0),
    "llama in fp16": Scenario(dtype="fp16"),
    "llama, accumulated": Scenario(accumulate=3, clip=1.0, steps=2),
    "llama, accumulated in host memory": Scenario(place=HOST, more=TIGHT, accumulate=3, steps=2),
    "llama, accumulated on nvme, one ahead": Scenario(
        place=SMALL, more=("memory.device=112KiB",), accumulate=3, steps=2
    ),
    "two ranks, accumulated in host memory": Scenario(
        more=("memory.device=176KiB",), accumulate=2, steps=2, world=2, clip=1.0
    ),
    "two ranks, accumulated on nvme": Scenario(
        place=SMALL, more=("memory.device=176KiB",), accumulate=3, steps=2, world=2
    ),
    "gpt2": Scenario(model="gpt2", clip=1.0),
    "gpt2 with dropout": Scenario(model="gpt2", dropout=0.1, more=("memory.activations=recompute",)),
    "t5": Scenario(model="t5", clip=1.0),
    "t5 in host memory, clipped": Scenario(model="t5", place=HOST, clip=1.0, steps=2),
    "vit": Scenario(model="vit"),
    "bert": Scenario(model="bert", clip=1.0),
    "gpt": Scenario(model="gpt"),
    "experts": Scenario(model="mixtral", clip=1.0, steps=2),
    "experts in tiles": Scenario(model="mixtral", clip=1.0, steps=2, more=("partition.tile=7KiB",)),
    "two ranks, accumulated and forgotten": Scenario(accumulate=3, world=2, steps=2, forgets=True),
    "activations kept": Scenario(more=("memory.activations=keep",), clip=1.0),
    "activations stored": Scenario(more=("memory.activations=offload",), clip=1.0),
    "activations stored in host memory": Scenario(
        model="gpt2", place=HOST, more=("memory.activations=offload",), clip=1.0, steps=2
    ),
    "activations recomputed": Scenario(more=("memory.activations=recompute",), clip=1.0),
    "activations planned": Scenario(more=("memory.activations=plan", "memory.device=400KiB"), clip=1.0),
    "logits in slices": Scenario(model="gpt2", more=("memory.logits=slices",), clip=1.0),
    "two ranks, logits in slices": Scenario(world=2, more=("memory.logits=slices",), steps=2),
    "layer schedule": Scenario(through=2, clip=1.0),
    "layer schedule, stored between blocks": Scenario(through=2, more=("memory.activations=offload",)),
    "layer schedule, in host memory between blocks": Scenario(
        place=HOST, through=4, more=("memory.activations=offload",), dropout=0.1, model="gpt2"
    ),
    "layer schedule in little memory": Scenario(through=4, more=("memory.device=160KiB",)),
    "lora": Scenario(lora=4),
    "lora, clipped, in host memory": Scenario(lora=4, clip=1.0, place=HOST),
    "base in MXFP4": Scenario(base="gpt_oss", lora=4, steps=2),
    "base in INT4": Scenario(base="gptq", lora=4, steps=2, accumulate=2, clip=1.0),
    "quantized base in host memory": Scenario(
        base="qwen3_fp8", lora=4, steps=2, more=("memory.host=64MiB", "memory.resident=true")
    ),
    "two ranks, quantized base": Scenario(base="qwen3_fp8", lora=4, steps=2, world=2, clip=1.0),
    "out and in again": Scenario(resumed=True, clip=1.0),
    "out and in again, in host memory": Scenario(resumed=True, place=HOST),
    "plain model, activations stored": Scenario(around="offload"),
    "plain model, activations in 2 bits": Scenario(around="offload", codec="2bit"),
    "plain model, activations in 8 bits": Scenario(around="offload", codec="int8"),
    "plain model, activations coded exactly": Scenario(model="t5", around="offload", codec="exact", steps=4),
    "plain model, activations recomputed": Scenario(model="gpt2", around="recompute"),
    "two ranks": Scenario(world=2),
    "two ranks in host memory, clipped": Scenario(world=2, place=HOST, clip=1.0),
    "two ranks, gpt2, activations stored": Scenario(
        model="gpt2", world=2, more=("memory.activations=offload",), steps=2
    ),
    "two ranks, t5, one version": Scenario(
        model="t5", world=2, clip=1.0, more=("memory.versions=1",), steps=2
    ),
    "two ranks, experts": Scenario(
        model="mixtral", world=2, steps=2, more=("partition.leaf=[MixtralExperts]",)
    ),
    "adapted experts": Scenario(model="mixtral", lora=8, clip=1.0, steps=2),
    "two ranks, adapted experts in tiles": Scenario(
        model="mixtral", lora=64, world=2, steps=2, more=("partition.tile=7KiB",)
    ),
    "two ranks, experts in tiles": Scenario(model="mixtral", world=2, steps=2, more=("partition.tile=7KiB",)),
    "base in MXFP4 in tiles": Scenario(base="gpt_oss", lora=4, steps=2, more=("partition.tile=7KiB",)),
    "two ranks, layer schedule": Scenario(world=2, through=2, clip=1.0, steps=2),
    "two ranks, lora": Scenario(world=2, lora=4, steps=2),
    "two nodes": Scenario(world=4, accumulate=2, clip=1.0, steps=3, more=(NODES, "memory.device=400KiB")),
    "two nodes, quantized base": Scenario(base="qwen3_fp8", lora=4, steps=2, world=4, more=(NODES,)),
    "two ranks, out and in again": Scenario(world=2, resumed=True, clip=1.0),
    "two ranks that share host memory": Scenario(
        place=HOST,
        more=(SHARED, "memory.device=176KiB"),
        accumulate=2,
        world=2,
        steps=2,
        clip=1.0,
        peeks=True,
    ),
    "four ranks that share host memory": Scenario(place=HOST, more=(SHARED,), world=4, steps=2),
    "two ranks in stages": Scenario(
        place=HOST, more=(*STAGED, "memory.device=176KiB"), world=2, through=2, steps=2
    ),
    "four ranks in stages": Scenario(
        model="gpt", place=HOST, more=STAGED, world=4, through=1, clip=1.0, steps=2
    ),
    "shared, quantized base": Scenario(
        base="qwen3_fp8",
        lora=4,
        steps=2,
        world=2,
        more=(SHARED, "memory.host=64MiB", "memory.resident=true"),
    ),
    "shared, out and in again": Scenario(place=HOST, more=(SHARED,), world=2, resumed=True, clip=1.0),
    "shared, on the device in part": Scenario(
        place=DEVICE, more=(SHARED, "memory.device=512KiB"), world=2, clip=1.0
    ),
    "shared, resident in part": Scenario(
        place=("memory.nvme=[{folder}]", "memory.host=400KiB", "memory.engine=threads"),
        more=(SHARED,),
        world=2,
        clip=1.0,
    ),
    "shared, muon": Scenario(update="muon", place=HOST, more=(SHARED,), world=2, clip=1.0, steps=2),
    "on the device": Scenario(place=DEVICE),
    "on the device, forgotten": Scenario(place=DEVICE, steps=2, forgets=True),
    "on the device after a step": Scenario(place=DEVICE[:1], clip=1.0),
    "two ranks on the device after a step": Scenario(place=DEVICE[:1], world=2),
    "on the device, clipped to a constant": Scenario(place=DEVICE, clip=1e-3, accumulate=2),
    "on the device in part": Scenario(place=DEVICE, clip=1.0, more=("memory.device=512KiB",)),
    "on the device in part, in fp32": Scenario(
        model="t5", dtype="fp32", place=DEVICE, clip=1.0, more=("memory.device=800KiB",)
    ),
    "on the device in fp16": Scenario(place=DEVICE, dtype="fp16"),
    "on the device, lora": Scenario(place=DEVICE, lora=4, clip=1.0),
    "on the device, experts": Scenario(model="mixtral", place=DEVICE, clip=1.0, steps=2),
    "on the device, layer schedule": Scenario(place=DEVICE, through=2, clip=1.0),
    "on the device beside planned activations": Scenario(
        place=DEVICE[:1], clip=1.0, steps=7, more=("memory.activations=plan", "memory.device=2MiB")
    ),
    "on the device, out and in again": Scenario(place=DEVICE, resumed=True, clip=1.0),
    "on the device, one more on nvme": Scenario(
        place=(*NVME[:1], "memory.host=500KiB", *NVME[-1:]), clip=1.0, more=("memory.activations=keep",)
    ),
    "two ranks on the device": Scenario(place=DEVICE, world=2),
    "two ranks on the device in part, accumulated": Scenario(
        place=DEVICE, world=2, clip=1.0, accumulate=2, more=("memory.device=400KiB",)
    ),
    "two ranks on the device, out and in again": Scenario(place=DEVICE, world=2, resumed=True, clip=1.0),
}

#: The last one needs an accelerator; the others run on the CPU, too.
ALL: dict[str, Scenario] = {
    **FAST,
    **SLOW,
    "updated on the accelerator": Scenario(more=("memory.updates=device",), clip=1.0, steps=2),
}
