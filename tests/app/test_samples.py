"""Samples while a run trains, and chat with its model."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import infinity
from infinity.app.export import chat, publish_run
from infinity.app.samples import SAMPLES, Samples, Writer, Writing, read_prompts
from infinity.app.train import train, write_model
from infinity.cli import main
from infinity.core.errors import RecipeError
from infinity.data.tokenizer import Chat, DataError, open_tokenizer
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks
from tests.helpers.runs import metrics_of
from tests.helpers.tokenizers import CHATML, write_tokenizer


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in ("kind", "step", "loss", "grad_norm", "lr")} for line in lines]


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def weights_of(run: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((run / "model").glob("*.safetensors"))]


def sampled(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    prompts = folder / "prompts.txt"
    prompts.write_text("the quick\n\nlazy d\n")
    given = ["train.sample_every=1", f"train.sample_prompts={prompts}", "train.sample_tokens=6", *more]
    return metrics_of(folder, name, *given)


def answer(folder: Path, prompt: str, **how: Any) -> str:
    out = io.StringIO()
    chat(folder, [prompt], Writing(6), out=out, **how)
    return out.getvalue().removesuffix("\n")


def test_samples_change_no_number_and_the_last_is_what_chat_writes(tmp_path: Path):
    without = metrics_of(tmp_path, "without", "run.save=true")
    assert numbers(sampled(tmp_path, "with", "run.save=true")) == numbers(without)
    assert weights_of(tmp_path / "with")
    assert weights_of(tmp_path / "with") == weights_of(tmp_path / "without")
    found = samples_of(tmp_path / "with")
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (1, 2, 3) for prompt in ("the quick", "lazy d")
    ]
    assert not (tmp_path / "without" / SAMPLES).exists()
    for line in found[-2:]:
        assert answer(tmp_path / "with", line["prompt"], plain=True) == line["text"]


def test_chat_of_an_interrupted_run_has_its_last_committed_weights(tmp_path: Path, monkeypatch, capsys):
    write = Samples.after

    def write_then_fail(self: Samples, step: int, step_s: float) -> bool:
        if step == 3:
            raise KeyboardInterrupt
        return write(self, step, step_s)

    monkeypatch.setattr(Samples, "after", write_then_fail)
    with pytest.raises(KeyboardInterrupt):
        sampled(tmp_path, "cut")
    found, last = samples_of(tmp_path / "cut"), io.StringIO()
    assert [line["step"] for line in found] == [1, 1, 2, 2]
    chat(tmp_path / "cut", ["the quick"], Writing(6), plain=True, out=last)
    main(["chat", str(tmp_path / "cut"), "--prompt", "the quick", "--tokens", "6", "--plain"])
    assert capsys.readouterr().out == last.getvalue()
    monkeypatch.setattr(Samples, "after", write)
    with (tmp_path / "cut" / SAMPLES).open("a") as file:  # a step that was not committed, and half a line
        file.write(json.dumps({"step": 9, "prompt": "p", "text": "t"}) + '\n{"step": 1')
    sampled(tmp_path, "cut")
    assert samples_of(tmp_path / "cut")[:4] == found
    assert [line["step"] for line in samples_of(tmp_path / "cut")][4:] in ([3, 3], [])


def train_on_two(folder: str) -> list[list[dict[str, Any]]]:
    lines = sampled(Path(folder), "with")
    return [numbers(lines), samples_of(Path(folder) / "with"), numbers(metrics_of(Path(folder), "without"))]


@pytest.mark.slow
def test_every_rank_writes_the_same_samples(tmp_path: Path):
    for with_samples, found, without in run_ranks(train_on_two, 2, str(tmp_path)):
        assert with_samples == without
        assert [line["step"] for line in found] == [1, 1, 2, 2, 3, 3]


#: Of a chat.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_base(folder: Path, template: str = TEMPLATE) -> Any:
    """Save a small Llama and its tokenizer, which is returned."""
    tokenizer = write_tokenizer(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, initializer_range=0.5,
        )
    ).save_pretrained(folder)  # fmt: skip
    return tokenizer


def test_a_transformers_model_writes_what_generate_writes(tmp_path: Path):
    tokenizer = make_base(tmp_path / "base")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    recipe = infinity.load_recipe(overrides=[f"model.path={tmp_path / 'base'}", "train.dtype=fp32"])
    model: Any = infinity.from_pretrained(tmp_path / "base", recipe, frozen=True).train()
    writer, question = Writer(model, recipe), [{"role": "user", "content": "hello there"}]
    given = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True
    )
    wanted = plain.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    state = torch.get_rng_state()
    text = "".join(writer.write(Chat(question, None), Writing(12)))
    assert text == tokenizer.decode(wanted)
    assert text
    drawn = ["".join(writer.write("hello", Writing(8, 1.0, seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    infinity.close(model)


def test_answers_of_a_model_that_was_written_end_where_the_template_ends_them(tmp_path: Path):
    tokenizer = make_base(tmp_path / "base", CHATML)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    recipe = infinity.load_recipe(overrides=[f"model.path={tmp_path / 'base'}", "train.dtype=fp32"])
    model = infinity.from_pretrained(tmp_path / "base", recipe)
    assert open_tokenizer(str(tmp_path / "base")).ends == {*ends}
    write_model(recipe, model, tmp_path / "all")
    infinity.close(model)
    model = infinity.add_lora(infinity.from_pretrained(tmp_path / "base", recipe, frozen=True), rank=2)
    infinity.save_lora(model, tmp_path / "adapters")
    infinity.close(model)
    publish_run(tmp_path / "adapters", tmp_path / "merged", merge=True)
    for name in ("all", "merged"):
        assert GenerationConfig.from_pretrained(tmp_path / name).eos_token_id == ends


def test_prompts_and_settings_that_cannot_be_used_are_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"train\.sample_prompts.*: got null; wanted a file of prompts"):
        infinity.load_recipe(overrides=["train.sample_every=2"])
    file = tmp_path / "prompts.jsonl"
    for text, why in (("", "has no prompt"), ('{"text": "a"}\n', "jsonl:1: wanted a record with prompt")):
        file.write_text(text)
        with pytest.raises(DataError, match=why):
            read_prompts(str(file))
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert read_prompts(str(file)) == ["a", Chat([{"role": "user", "content": "b"}], None)]
    encoded = open_tokenizer("bytes").encode_question(Chat([{"role": "user", "content": "b"}], None))
    assert bytes(encoded) == b"user: b\nassistant: "


@pytest.mark.parametrize("trained", few(["two adapters"], ["all", "adapters", "two adapters"]))
def test_chat_of_a_fine_tune_writes_what_its_run_did(tmp_path: Path, trained: str, monkeypatch):
    make_base(tmp_path / "base")
    question = {"messages": [{"role": "user", "content": "hello there"}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(question) + "\n")
    for name, answered in (("a", "general"), ("b", "quick fox")):
        given = {"messages": [*question["messages"], {"role": "assistant", "content": answered}]}
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(given) + "\n") * 8)
    recipe = [
        f"run.dir={tmp_path}", "run.name=tuned", "observe.progress=false", "train.steps=2",
        f"data.cache={tmp_path}/tokens", "data.eval_fraction=0",
        f"model.path={tmp_path}/base", "model.seq_len=64", "optim.lr=0.1", "train.threads=1",
        "train.batch_size=2", "train.dtype=fp32", "train.sample_every=2", "train.sample_tokens=6",
        f"train.sample_prompts={tmp_path}/prompts.jsonl", "train.eval_every=null", "run.save=true",
    ]  # fmt: skip
    names = ("a", "b") if trained == "two adapters" else ()
    for name in names:
        recipe += [f"adapters.{name}.data.files=[{tmp_path}/{name}.jsonl]", f"adapters.{name}.lora.rank=2"]
    if not names:
        recipe += [f"data.files={tmp_path}/a.jsonl", *(["lora.rank=2"] if trained == "adapters" else [])]
    train(infinity.load_recipe(overrides=recipe))
    run = tmp_path / "tuned"
    found = samples_of(run)
    assert [line.get("adapter") for line in found] == list(names or (None,))
    for line in found:
        assert line["prompt"] == question["messages"]
        assert line["text"]
        assert answer(run, "hello there", adapter=line.get("adapter")) == line["text"]
    publish_run(run, tmp_path / "out")
    exact = infinity.load_recipe(overrides=["train.dtype=fp32", "train.threads=1"])
    monkeypatch.setattr(
        "infinity.app.export.Recipe", lambda: exact
    )  # of what was exported: no recipe says it
    for line in found:
        assert answer(tmp_path / "out", "hello there", adapter=line.get("adapter")) == line["text"]
    if names:
        assert found[0]["text"] != found[1]["text"]
        with pytest.raises(RecipeError, match=r"takes one of the adapters a, b: add --adapter NAME"):
            answer(run, "hello there")
    with pytest.raises(RecipeError, match=r"no 'c'; there are: "):
        answer(run, "hello there", adapter="c")
