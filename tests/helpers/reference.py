"""The plain PyTorch loop that applies the same update rule: what every placement must equal.

Written from the rule alone, with nothing of ours imported, so that both cannot be wrong in
the same way. One process, the whole model in memory, fp32 masters beside compute weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule's name and numbers, those of AdamW by default; they suit tiny models."""

    name: str = "adamw"
    numbers: tuple[tuple[str, Any], ...] = ()  # of another rule
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How the loss scale of fp16 training moves; the scale itself is the loop's."""

    first: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


class Reference:
    """Trains ``model``, made in fp32, in ``dtype``; afterwards its parameters are the weights.

    The rule is applied on the CPU, wherever the model is.

    Attributes:
        masters: fp32 weights, by parameter name (a tied parameter has one name).
        steps: Steps that updated; a skipped step counts none.
        counts: Updates of each parameter: none in a step that gave it no gradient.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, rule: Rule | None = None, scale: Scale | None = None
    ) -> None:
        self.model, self.dtype, self.rule = model, dtype, rule or Rule()
        self.scaling = scale or Scale()
        self.loss_scale = self.scaling.first if dtype == torch.float16 else 1.0
        self.steps, self._good = 0, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        self.masters = {name: p.detach().float().cpu().clone() for name, p in self.parameters.items()}
        self.m = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        self.counts = dict.fromkeys(self.masters, 0)
        for name, p in self.parameters.items():
            p.data = compute_weight(self.masters[name], dtype).to(p.device)

    def step(self, micro_batches: Sequence[dict[str, Any]], *, lr: float | None = None) -> "Outcome":
        """One update from ``micro_batches``, whose gradients are added as torch adds them.

        The losses are not divided: who accumulates divides, or does not, in the batches' loss.
        """
        return self.finish([self.backward(batch) for batch in micro_batches], lr=lr)

    def backward(self, batch: dict[str, Any]) -> Tensor:
        """Add the gradients of one micro-batch to ``p.grad``; return its loss."""
        loss = self.model(**batch).loss
        (loss * self.loss_scale if self.dtype == torch.float16 else loss).backward()
        return loss.detach()

    def finish(self, losses: list[Tensor], *, lr: float | None = None) -> "Outcome":
        """One update from what is in ``p.grad``."""
        norm = self._grad_norm()
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            self._update(norm, self.rule.lr if lr is None else lr)
        self._adapt(skipped)
        for p in self.parameters.values():
            p.grad = None
        return Outcome(losses=losses, grad_norm=float(norm), skipped=skipped)

    def _grad_norm(self) -> Tensor:
        """The global norm: squares summed in float64, parameter by parameter; unscaled."""
        total = torch.zeros((), dtype=torch.float64)
        for p in self.parameters.values():
            if p.grad is not None:
                total += p.grad.double().square().sum().cpu()
        return total.sqrt() / self.loss_scale

    def _update(self, norm: Tensor, lr: float) -> None:
        rule, limit = self.rule, self.rule.max_grad_norm
        self.steps += 1
        coefficient = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        factor = _f32(float(_f32(coefficient)) / self.loss_scale)
        for name, p in self.parameters.items():
            if p.grad is None:
                continue  # as torch's optimizers do: neither decay nor momentum moves it
            g = p.grad.float().cpu() * factor
            decay = dict(rule.numbers).get("weight_decay", rule.weight_decay) if p.ndim >= 2 else 0.0
            self.counts[name] += 1
            if rule.name == "adamw":
                adamw_(self.masters[name], self.m[name], self.v[name], g, self.counts[name], lr, decay, rule)
            else:
                update, moments = UPDATES[rule.name], (self.m[name], self.v[name])
                group = {**dict(rule.numbers), "lr": lr, "weight_decay": decay, "dtype": self.dtype}
                update(self.masters[name], *moments, g, self.counts[name], group)
            p.data = compute_weight(self.masters[name], self.dtype).to(p.device)

    def _adapt(self, skipped: bool) -> None:
        """The loss scale after this step (fp16 only)."""
        if self.dtype != torch.float16:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.loss_scale *= self.scaling.backoff
        elif self._good == self.scaling.interval:
            self.loss_scale, self._good = self.loss_scale * self.scaling.growth, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step did."""

    losses: list[Tensor]
    grad_norm: float
    skipped: bool


def adamw_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, lr: float, decay: float, rule: Rule) -> None:
    """AdamW on fp32 tensors, in place, one correctly rounded operation after the other.

    The root is taken in float64 and rounded once: torch's own fp32 root on CPUs comes from a
    vector library that is sometimes off in the last place.

    Source: Decoupled Weight Decay Regularization (arXiv:1711.05101), algorithm 2.
    """
    b1, b2 = rule.betas
    p.mul_(_f32(1 - lr * decay))
    m.add_(_f32(1 - b1) * (g - m))
    v.copy_(v * _f32(b2) + _f32(1 - b2) * (g * g))
    root = v.double().sqrt().float() / _f32(math.sqrt(1 - b2**t))
    p.sub_(_f32(lr / (1 - b1**t)) * (m / (root + _f32(rule.eps))))


def _f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def compute_weight(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The compute-dtype weight of an fp32 master.

    bf16 rounds to nearest with ties up (not to even): half of the last place kept is added to
    the bits, then the low half is cut. Of two bf16 numbers equally far the one larger in
    magnitude is taken, so what was cut always fits a signed 16-bit remainder.
    """
    if dtype != torch.bfloat16:
        return master.to(dtype).clone()
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((bits + 0x8000) >> 16) & 0xFFFF
    signed = torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)
    return signed.view(torch.bfloat16)


def adam_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """Adam with weight decay in the gradient. Source: arXiv:1412.6980, algorithm 1."""
    (b1, b2), lr = group["betas"], group["lr"]
    g = g + _f32(group["weight_decay"]) * p
    m.add_(_f32(1 - b1) * (g - m))
    v.copy_(v * _f32(b2) + _f32(1 - b2) * (g * g))
    root = v.double().sqrt().float() / _f32(math.sqrt(1 - b2**t))
    p.sub_(_f32(lr / (1 - b1**t)) * (m / (root + _f32(group["eps"]))))


def lion_(p: Tensor, m: Tensor, _: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """Lion. Source: Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675), program 1."""
    (b1, b2), lr = group["betas"], group["lr"]
    direction = (m + _f32(1 - b1) * (g - m)).sign()
    p.copy_(p * _f32(1 - lr * group["weight_decay"]) - _f32(lr) * direction)
    m.add_(_f32(1 - b2) * (g - m))


def sgd_(p: Tensor, buffer: Tensor, _: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """SGD as ``torch.optim.SGD`` describes it."""
    mu = _f32(group["momentum"])
    g = g + _f32(group["weight_decay"]) * p
    buffer.copy_(mu * buffer + _f32(1.0 if t == 1 else 1 - group["dampening"]) * g)
    p.sub_(_f32(group["lr"]) * (g + mu * buffer if group["nesterov"] else buffer))


def schedulefree_(p: Tensor, v: Tensor, apart: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """Schedule-free AdamW on y; ``apart`` is x - y. Source: arXiv:2405.15682, algorithm 1.

    With z = y - b1 / (1 - b1) (x - y), its lines become: x - y grows by (1 - b1) times the step of z, and
    the new z takes part c of x, and with it b1 c / (1 - b1) times as much of y.
    """
    (b1, b2), warmup = group["betas"], max(1, group["warmup_steps"])
    shares = [min(1.0, i / warmup) ** 2 for i in range(1, t + 1)]
    c = shares[-1] / sum(shares)
    v.copy_(v * _f32(b2) + _f32(1 - b2) * (g * g))
    root = v.double().sqrt().float() / _f32(math.sqrt(1 - b2**t))
    direction = g / (root + _f32(group["eps"])) + _f32(group["weight_decay"]) * p
    step = _f32(group["lr"] * (1 - b1) * min(t, warmup) / warmup) * direction
    apart.add_(step)
    p.copy_(p - step - _f32(c * b1 / (1 - b1)) * apart)
    apart.mul_(_f32(1 - c))


def adafactor_(p: Tensor, row: Tensor, col: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """Adafactor. Source: arXiv:1804.04235, algorithm 4, with a learning rate, matrix by matrix.

    What is kept of a matrix is the first column of ``row`` and the first row of ``col``; of a vector, all of
    ``row`` is used. An update has the dtype of gradients.
    """
    toward = t ** -group["decay_rate"]
    if p.ndim < 2:
        row.lerp_(g * g + group["eps"], toward)
        matrices = [(g[None], row[None].rsqrt())]
    else:
        matrices = []
        for n in range(math.prod(p.shape[:-2])):
            gradient, r, c = (each.view(-1, *p.shape[-2:])[n] for each in (g, row, col))
            squares = gradient * gradient + group["eps"]
            r[:, 0] = r[:, 0].lerp(squares.mean(1), toward)
            c[0] = c[0].lerp(squares.mean(0), toward)
            rows = r[:, 0].contiguous()
            matrices.append((gradient, (rows / rows.mean()).rsqrt()[:, None] * c[0].rsqrt()))
    updates = []
    for gradient, factor in matrices:
        update = gradient * factor
        length = update.square().mean().sqrt() / group["clip_threshold"]
        updates.append((update / length.clamp(min=1)).to(group["dtype"]).float())
    step = torch.stack(updates).view(p.shape)
    p.copy_(p * _f32(1 - group["lr"] * group["weight_decay"]) - _f32(group["lr"]) * step)


def in_spaces_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """APOLLO, GaLore and SOAP, matrix by matrix (arXiv:2412.05270, 2403.03507, 2409.11321); else AdamW.

    What they keep is an attribute of ``p``. An update has the dtype of gradients.
    """
    every = vars(p).setdefault("kept", [{} for _ in range(math.prod(p.shape[:-2]))])
    gradients = g.view(-1, *p.shape[-2:]) if p.ndim > 1 else [g]
    updates = []
    for gradient, kept in zip(gradients, every, strict=True):
        turn = "rank" in group and p.ndim > 1 and p.shape[-2] > p.shape[-1]
        made = _in_space(gradient.T if turn else gradient, kept, t, group)
        updates.append((made.T if turn else made).to(group["dtype"]).float())
    step = torch.stack(updates).view(p.shape)
    p.copy_(p * _f32(1 - group["lr"] * group["weight_decay"]) - _f32(group["lr"]) * step)


def _vectors(gram: Tensor) -> Tensor:
    scaled = gram.double() / gram.double().abs().max().clamp(min=1e-30)
    return torch.linalg.eigh(scaled)[1].flip(1).float()


def _in_space(g: Tensor, kept: dict[str, Tensor], t: int, group: dict[str, Any]) -> Tensor:
    def adam(grad: Tensor, t: int = t, mean: Tensor | None = None) -> Tensor:
        b1, b2 = group["betas"]
        if mean is None:
            mean = kept["m"] = kept.get("m", torch.zeros_like(grad)).lerp(grad, 1 - b1)
        kept["v"] = kept.get("v", torch.zeros_like(grad)).lerp(grad * grad, 1 - b2)
        return mean / (1 - b1**t) / ((kept["v"] / (1 - b2**t)).sqrt() + 1e-8)

    if g.ndim < 2:
        return adam(g)
    if "rank" not in group:
        made, sides = torch.zeros_like(g), {"l": g, "r": g.T}
        if t > 1:
            kept["m"] = kept.get("m", torch.zeros_like(g)).lerp(g, 1 - group["betas"][0])
            left, right = kept["l vectors"], kept["r vectors"]
            turned = left.T @ g @ right, left.T @ kept["m"] @ right
            made = left @ adam(turned[0], t - 1, turned[1]) @ right.T
        for side, each in sides.items():
            kept[side] = kept.get(side, torch.zeros(())).lerp(each @ each.T, 1 - group["betas"][1])
            if t == 1:
                kept[f"{side} vectors"] = _vectors(kept[side])
            elif (t - 1) % group["precondition_frequency"] == 0:
                kept[f"{side} vectors"] = torch.linalg.qr(kept[side] @ kept[f"{side} vectors"])[0]
        return made
    first, rank = (t - 1) % group["update_proj_gap"] == 0, group["rank"]
    if "seed" not in group:
        if first:
            unit = g / g.abs().max().clamp(min=1e-30)
            new = _vectors(unit @ unit.T)[:, :rank].contiguous()
            kept["p"] = torch.where((new * kept.get("p", new)).sum(0) < 0, -new, new)
        return kept["p"] @ adam(kept["p"].T @ g) * group["scale"]
    if first:
        random = torch.Generator().manual_seed(group["seed"] + (t - 1) // group["update_proj_gap"])
        kept["p"] = torch.randn(rank, len(g), generator=random) / math.sqrt(rank)
    low = kept["p"] @ g
    dim = None if group["per_tensor"] else 0
    before, after = (torch.linalg.vector_norm(each, dim=dim) for each in (low, adam(low)))
    made = g * torch.where(before > 0, after / before, 0) * group["scale"]
    norm, most = torch.linalg.vector_norm(made), kept.get("norm", torch.zeros(())) * group["growth"]
    kept["norm"] = torch.minimum(norm, most) if most > 0 else norm
    return made * (most / norm) if 0 < most < norm else made


def adamw8bit_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    """AdamW whose moments are rounded to 8 bits after each step; see :func:`in_codes`."""
    rule = Rule(betas=group["betas"], eps=group["eps"])
    adamw_(p, m, v, g, t, group["lr"], group["weight_decay"], rule)
    m.copy_(in_codes(m, 127))
    v.copy_(in_codes(v, 255))


def adamw4bit_(p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, group: dict[str, Any]) -> None:
    rule = Rule(betas=group["betas"], eps=group["eps"])
    adamw_(p, m, v, g, t, group["lr"], group["weight_decay"], rule)
    m.copy_(in_codes(m, 7, 128, 2))
    v.copy_(in_codes(v, 15, 128, 1))


def in_codes(x: Tensor, most: int, size: int = 256, power: int = 4) -> Tensor:
    """Round to the levels of codes 0, 1, ... ``most`` of each block of elements, counted in the flat tensor.

    The bits of a float32 are a line through the logarithm of each power of two. A level's bits are
    ``power`` times as far below those of the block's largest magnitude as its code's are below those of
    ``most``. What is between two levels goes to the code that is nearer in the same sense, halves to the
    even one. What is above 0 stays so if there are no signs (``most`` is 255 or 15).
    """
    flat, top = x.detach().reshape(-1).numpy(), _bits_of(np.float32(most))
    rounded = np.empty_like(flat)
    for begin in range(0, len(flat), size):
        block = flat[begin : begin + size]
        largest = _bits_of(np.maximum(np.abs(block).max(), np.float32(2.0**-95)))
        place = top - largest // power + _bits_of(np.abs(block)) // power
        codes = np.rint(place.astype(np.int32).view(np.float32))
        if most in (15, 255):
            codes[(block > 0) & (codes < 1)] = 1
            codes[block == 0] = 0
        level = largest - power * (top - _bits_of(codes))
        values = np.where(codes > 0, level, 0).astype(np.int32).view(np.float32)
        rounded[begin : begin + size] = np.copysign(values, block)
    return torch.from_numpy(rounded).view(x.shape)


def _bits_of(x: Any) -> Any:
    return np.asarray(x, np.float32).view(np.int32).astype(np.int64)


UPDATES = {
    "adam": adam_, "adamw4bit": adamw4bit_, "adamw8bit": adamw8bit_, "lion": lion_, "sgd": sgd_,
    "schedulefree": schedulefree_, "adafactor": adafactor_,
    "apollo": in_spaces_, "apollo-mini": in_spaces_, "galore": in_spaces_, "soap": in_spaces_,
}  # fmt: skip
