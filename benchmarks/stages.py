"""Bytes that ranks move in the layer schedule: each all blocks' weights, or blocks in stages over the ranks.

    python benchmarks/stages.py [--quick]

First counted, with real ranks of one machine (gloo, CPUs): bytes of blocks' weights that a rank uses, in
forward and in backward, which it would upload beside an accelerator, and bytes that it sent to other ranks.
Then, by the same formulas, how long the link of an RTX 4090 brings bytes in a step on 8 of them, and how long
products are. Both are arithmetic, and no step time: weights come from memory that ranks share, gradients are
reduced once, blocks are recomputed (8 operations per parameter and token).
"""

import contextlib
import json
import subprocess
import sys

import torch
import torch.distributed as dist
from report import print_table

import infinity
from infinity.predict.machines import load_machine
from infinity.recipes.models import GPT, GPTConfig

MICRO, SEQUENCE, WIDTH, BLOCKS = 4, 64, 128, 8
#: Parameters, blocks and width of models of the sizes in RoundPipe's rows, with 4,096 tokens a micro-batch.
MODELS = {"8 B": (8e9, 32, 4096), "32 B": (32e9, 64, 5120)}
CARDS, TOKENS = 8, 4096
#: Experts of a block, their widths, those of a token, and bytes of a weight as it is stored.
EXPERTS = {"Qwen3-235B, bf16": (128, 4096, 1536, 8, 2), "DeepSeek-V3, FP8": (256, 7168, 2048, 8, 1)}


def step(staged: bool) -> tuple[int, int, int]:
    """Return bytes of weights that a rank used in a step, those that it sent, and those of all blocks."""
    keys = ["train.dtype=bf16", "memory.host=1GiB", "train.schedule=layer"]
    used, last = list[int](), [-1]
    with infinity.Init(infinity.load_recipe(overrides=[*keys, f"train.stages={str(staged).lower()}"])):
        model = GPT(GPTConfig(vocab_size=512, seq_len=SEQUENCE, d_model=WIDTH, n_layers=BLOCKS, n_heads=4))
    with contextlib.closing(infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)) as optimizer:
        scheduled = infinity.layer_schedule(model, MICRO)
        nbytes = [2 * sum(p.numel() for p in block.parameters()) for block in scheduled.blocks.modules]

        def note(number: int) -> None:  # all micro-batches of a block come one after another
            if last[0] != number or len(used) == turn:
                used.append(nbytes[number])
            last[0] = number

        for number, block in enumerate(scheduled.blocks.modules):
            block.register_forward_pre_hook(lambda *_, number=number: note(number))
        turn, ids = -1, torch.randint(0, 512, (MICRO, SEQUENCE))
        loss = scheduled(ids, targets=ids).loss
        turn = len(used)  # backward begins with the block that was the last
        loss.backward()
        optimizer.step()
        return sum(used), scheduled.stages.messages.nbytes_sent if staged else 0, sum(nbytes)


def work() -> None:
    """Run a step in both ways on this rank; rank 0 prints what all found."""
    dist.init_process_group("gloo")
    found = [step(staged) for staged in (False, True)]
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


def counted(worlds: tuple[int, ...]) -> None:
    rows, value = list[list[str]](), SEQUENCE * WIDTH * 2
    for world in worlds:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), __file__]
        output = subprocess.run([*command, "--work"], check=True, capture_output=True, text=True).stdout
        every = json.loads(output.splitlines()[-1])
        # Between blocks each value and gradient crosses once; at both ends those of other ranks.
        sent = 2 * world * MICRO * (BLOCKS - 1) + 2 * 2 * (world - 1) * MICRO
        for way, name in enumerate(("all", "stages")):
            weights, given, blocks = zip(*(each[way] for each in every), strict=True)
            planned = 2 * blocks[0] / (world if way else 1)
            rows.append(
                [
                    f"{world}",
                    name,
                    f"{max(weights):,}",
                    f"{planned:,.0f}",
                    f"{sum(given):,}",
                    f"{way * sent * value:,}",
                ]
            )
    columns = ["ranks", "blocks", "weights used, bytes", "formula", "sent by all ranks, bytes", "formula"]
    print("Counted in one step, bf16:")
    print_table(columns, rows)


def planned() -> None:
    machine, rows = load_machine("server-4090-800g"), list[list[str]]()
    link, flops = (
        machine.links.host_bytes_per_s,
        machine.devices.bf16_flops_per_s * machine.devices.efficiency,
    )
    assert link is not None
    for name, (params, blocks, width) in MODELS.items():
        for micro in (1, 4, 16):
            weights, gradients = 2 * 2 * params / link, 2 * params / link / CARDS
            passed = 2 * 2 * TOKENS * width * micro * blocks / link  # values and gradients; as many go down
            compute = 8 * params * TOKENS * micro / flops
            fill = 1 + (CARDS - 1) / (micro * blocks)  # ranks that wait for the first values
            staged = weights / CARDS + gradients + passed
            rows.append(
                [name, f"{micro}", f"{weights + 2 * params / link:.2f}", f"{staged:.2f}", f"{compute:.2f}",
                 f"{compute * fill:.2f}"]
            )  # fmt: skip
    columns = [
        "model",
        "micro-batches a rank",
        "link, all",
        "link, stages",
        "products",
        "with the pipeline's fill",
    ]
    print("8 x RTX 4090, seconds of a step, by arithmetic (link: to a card):")
    print_table(columns, rows)


def experts() -> None:
    """Print what the link of one of 8 cards brings for a block's experts in a step.

    Gathered, their weights come twice. If tokens are sent to the rank of each of their experts, they go there
    and back in forward, when experts are computed again, and in backward as gradients. In stages each goes
    once to its block and its gradient once back. In both a rank has its part of the weights twice.
    """
    rows = list[list[str]]()
    for name, (count, width, hidden, top_k, itemsize) in EXPERTS.items():
        weights, others = 2 * itemsize * 3 * count * width * hidden, (CARDS - 1) / CARDS
        for tokens in (4096, 16384, 65536):
            sent, once = 6 * 2 * tokens * top_k * width * others, 2 * 2 * tokens * width
            each = weights, weights / CARDS + sent, weights / CARDS + once
            rows.append([name, f"{tokens:,}", *(f"{nbytes / 1e9:.2f}" for nbytes in each)])
        even = weights / (6 * 2 * top_k * width)
        rows.append([name, f"{even:,.0f}", *["equal"] * 2, ""])
    print(f"A block's experts on {CARDS} cards, GB to a card in a step, by arithmetic:")
    print_table(["model", "tokens a rank", "gathered", "tokens to experts", "stages of blocks"], rows)


if __name__ == "__main__":
    if "--work" in sys.argv:
        work()
    else:
        counted((2,) if "--quick" in sys.argv else (2, 4))
        planned()
        experts()
