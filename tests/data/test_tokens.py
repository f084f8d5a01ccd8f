"""Tokens of every kind of document, cached once under a name that changes with the files."""

import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from infinity.core.files import is_locked, lock_file
from infinity.data import helpers
from infinity.data import tokens as tokens_module
from infinity.data.sources import Source
from infinity.data.tokenizer import BytesTokenizer, DataError, encode_completion, open_tokenizer
from infinity.data.tokens import TokenCache, Tokens
from tests.helpers.cases import examples
from tests.helpers.limits import comes_true
from tests.helpers.tokenizers import write_tokenizer

CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, tokenizer: str = "bytes", **how: bool) -> Tokens:
    return TokenCache(folder=path.parent / "cache", tokenizer=open_tokenizer(tokenizer), **how).open(
        [Source(path)]
    )


def documents(tokens: Tokens) -> list[bytes]:
    return [bytes(tokens.values[start:stop]) for start, stop, *_ in tokens.documents]


def test_kinds_of_lines_may_be_mixed_and_only_answers_count_in_the_loss(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"prompt": "2+2=", "completion": "4"}, {"messages": CHAT}]
    tokens = read(write(tmp_path / "a.jsonl", *lines))
    assert documents(tokens) == [b"one\0", b"2+2=4\0", b"user: ?\nassistant: !\0"]
    assert tokens.loss_mask is not None
    assert bytes(tokens.values[tokens.loss_mask]) == b"one\x004\0!\0"
    assert tokens.documents[:, 2].tolist() == [4, 2, 2]


def test_no_mask_is_stored_if_every_token_counts(tmp_path: Path) -> None:
    tokens = read(write(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}))
    assert tokens.loss_mask is None
    assert documents(tokens) == [b"one\0", b"\0"]
    assert {path.name for path in (tmp_path / "cache").glob("*/*")} == {"tokens", "documents", "about.json"}


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    tokens = read(write(tmp_path / "a.txt", "one\n\ntwo"))
    assert tokens.documents.tolist() == [[0, 9, 9, 0]]


def test_a_tokenizers_opening_precedes_texts_and_prompts(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path / "model", opens=True)
    lines = [{"text": "the"}, {"prompt": "a", "completion": "b"}]
    tokens = read(write(tmp_path / "a.jsonl", *lines), str(tmp_path / "model"))
    assert library.decode(tokens.values) == "<s>the</s><s>ab</s>"
    assert tokens.documents[:, 2].tolist() == [3, 2]
    text = read(write(tmp_path / "a.txt", "the\n" * 3), str(tmp_path / "model"))
    assert library.decode(text.values) == "<s>" + "the\n" * 3 + "</s>"


def test_a_directory_without_an_opening_gets_none(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert open_tokenizer(str(tmp_path)).opening is None


def test_a_prompt_has_the_tokens_that_it_has_on_its_own(tmp_path: Path) -> None:
    library = write_tokenizer(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    shared = encode_completion("xa", "by", tokenizer)  # "ab" would be one token
    assert [library.decode([t]) for t in shared.tokens] == ["x", "a", "b", "y"]
    assert shared.loss_mask.tolist() == [False, False, True, True]
    apart = encode_completion("x", "ab the", tokenizer)
    assert [library.decode([t]) for t in apart.tokens] == ["x", "ab", " the"]
    assert apart.loss_mask.tolist() == [False, True, True]


def test_a_malformed_line_is_named_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "good"}, "\n", "nonsense\n")
    with pytest.raises(DataError, match=r"not JSON.*; data\.skip_malformed=true skips such rows") as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ")


def test_malformed_lines_are_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "nonsense\n", {"text": "good"}, {"messages": []}, {"text": "too"})
    for _ in range(2):  # the second time from the cache
        tokens = read(path, skip_malformed=True)
        assert documents(tokens) == [b"good\0", b"too\0"]
        assert tokens.malformed[0] == 2
        assert tokens.malformed[1].startswith(f"{path}:1: not JSON")
    with pytest.raises(DataError, match="not JSON"):  # that cache is used only with skip_malformed
        read(path)


def test_a_malformed_line_of_a_part_has_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "x" * 50}) + "\n" * (1 + number % 3) for number in range(60)]
    lines[41] = "no object\n"
    path.write_text("".join(lines))
    with Path(path).open() as file:
        wanted = next(number for number, line in enumerate(file, 1) if line == "no object\n")
    for of in (1, 2, 7):
        parts = [Source(path, number, of) for number in range(of)]
        cache = TokenCache(folder=tmp_path / f"{of}", tokenizer=BytesTokenizer(), skip_malformed=True)
        (said,) = [each for part in parts if (each := cache.open([part]).malformed[1])]
        assert said.startswith(f"{path}:{wanted}: not JSON")


def test_a_line_without_targets_is_malformed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", chat_template="{{ messages[0]['content'] }}")
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(DataError, match=r"a\.jsonl:1: none of its tokens counts in the loss"):
        read(path, str(tmp_path / "model"))


def test_a_missing_template_is_an_error_even_when_malformed_lines_are_skipped(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", chat_template=None)
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(DataError, match=r"a\.jsonl:1: data\.tokenizer: .* has no chat template"):
        read(path, str(tmp_path / "model"), skip_malformed=True)


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: .*: transformers finds no tokenizer there"):
        open_tokenizer(str(tmp_path))


def test_another_template_is_another_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    seen = []
    for word in ("one", "two"):
        template = f"{word}: {{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}"
        library = write_tokenizer(tmp_path / "model", chat_template=template)
        seen.append(library.decode(read(path, str(tmp_path / "model")).values))
    assert seen == ["one: ?!", "two: ?!"]


def test_memory_does_not_grow_with_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *([{"prompt": "p" * 500, "completion": "c" * 500}] * 3000))
    read(path).values.sum()  # what is imported once
    path = path.rename(tmp_path / "b.jsonl")
    tracemalloc.start()
    try:
        tokens = read(path)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokens.values.nbytes == 3000 * 1001
    assert peak_nbytes < 2**20


def test_only_their_user_can_read_tokens_and_choose_them(tmp_path: Path) -> None:
    path, before = write(tmp_path / "a.jsonl", {"prompt": "secret", "completion": "x"}), os.umask(0)
    try:
        read(path)
    finally:
        os.umask(before)
    (entry,) = (tmp_path / "cache").glob("*/")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == entry.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in entry.iterdir()} == {0o600}
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "cache").glob("*.lock")} == {0o600}
    entry.chmod(0o755)  # as earlier versions made it
    read(path)
    assert entry.stat().st_mode & 0o777 == 0o700
    entry.chmod(0o777)
    with pytest.raises(DataError, match=rf"data\.cache: {entry} is writable by all users"):
        read(path)
    moved = entry.rename(tmp_path / "moved")
    entry.symlink_to(moved)
    with pytest.raises(DataError, match=rf"data\.cache: {entry} is a symbolic link"):
        read(path)


def test_a_planted_link_in_a_cache_leads_nowhere(tmp_path: Path) -> None:
    path, victim = write(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "victim"
    victim.write_text("precious")
    read(path)
    (entry,) = (tmp_path / "cache").glob("*/")
    shutil.rmtree(entry)
    entry.with_suffix(".lock").unlink()
    entry.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(DataError, match=r"data\.cache: .*\.lock is a symbolic link"):
        read(path)
    assert victim.read_text() == "precious"


def test_leftovers_of_a_killed_writer_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"})
    read(path)
    (entry,) = (tmp_path / "cache").glob("*/")
    shutil.move(entry, entry.with_suffix(".partial"))
    assert documents(read(path)) == [b"one\0"]
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize("name", ["tokens", "counts", "documents", "about.json"])
def test_a_file_of_the_cache_that_is_cut_is_an_error_that_says_what_to_remove(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "one", "completion": "two"})
    whole = read(path)
    (entry,) = (tmp_path / "cache").glob("*/")
    os.truncate(entry / name, (entry / name).stat().st_size // 2)
    with pytest.raises(DataError, match=rf"data\.cache: {entry} is damaged: .*; remove it"):
        read(path)
    shutil.rmtree(entry)
    assert read(path).digest == whole.digest


def test_a_cache_entry_is_on_the_drive_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()

    def note(path: Path) -> None:
        assert not [entry for entry in (tmp_path / "cache").glob("*/") if entry.suffix != ".partial"]
        synced.add(path.name)

    monkeypatch.setattr(tokens_module, "sync", note)
    read(write(tmp_path / "a.jsonl", {"text": "one"}))
    (entry,) = (tmp_path / "cache").glob("*/")
    assert synced == {"tokens", "documents", "about.json", f"{entry.name}.partial"}


LINES = st.lists(
    st.binary(max_size=30)
    | st.sampled_from(
        [
            json.dumps(x).encode()
            for x in ({"text": "a"}, {"messages": CHAT}, {"prompt": "", "completion": ""})
        ]
    )
    | st.dictionaries(
        st.sampled_from(["text", "prompt", "completion", "messages"]),
        st.text() | st.none() | st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()})),
    ).map(lambda value: json.dumps(value).encode()),
    max_size=6,
)


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, skip=st.booleans())
def test_any_jsonl_is_tokens_or_an_error_of_data(
    tmp_path_factory: pytest.TempPathFactory, lines: Sequence[bytes], skip: bool
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found: Tokens | DataError
    try:
        found = read(path, skip_malformed=skip)
    except DataError as error:
        found = error
    if isinstance(found, DataError):
        assert not skip
        assert str(found).startswith(f"{path}:")
        return
    assert skip or not found.malformed[0]
    stops = found.documents[:, 1]
    assert np.array_equal(found.documents[1:, 0], stops[:-1])
    assert len(found.values) == (stops[-1] if len(stops) else 0)
    assert (found.documents[:, 2] <= stops - found.documents[:, 0]).all()


tokenizers = pytest.importorskip("tokenizers")


def write_word_level(path: Path) -> Path:
    vocabulary = {"<|endoftext|>": 0, "unk": 1, "the": 2, "cat": 3}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="unk"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(path))
    return path


def test_bytes_of_every_file_are_followed_by_a_separator(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    files[0].write_text("aä\n")
    files[1].write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "y"}))
    found = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()).open([*map(Source, files)])
    assert bytes(found.values) == "aä\n\0x\0y\0".encode()
    assert found.values.dtype == np.uint8


def test_a_local_tokenizer_gives_its_own_numbers(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_word_level(tmp_path / "tokenizer.json")))
    (tmp_path / "a.txt").write_text("the cat sat")
    found = TokenCache(folder=tmp_path / "cache", tokenizer=tokenizer).open([Source(tmp_path / "a.txt")])
    assert found.values.tolist() == [2, 3, 1, 0]
    assert tokenizer.vocab_size == 4


def test_tokenizers_that_are_not_there_or_not_tokenizers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such file.*wanted bytes, a tokenizer\.json or a dir"):
        open_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "bad.json"))


def test_what_killed_runs_have_left_in_the_cache_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    cache = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer())
    cache.open([Source(tmp_path / "a.txt")])
    whole = {path.name for path in cache.folder.iterdir()}
    a, b, c, d, e = (each * 32 for each in "abcde")
    others = {"chats.2024", "run.partial", "words.part"}  # the user's own
    for name in (f"{a}.partial", f"{b}.partial", f"{c}.part", f"{d}.part", f"{e}.partial", *others):
        (cache.folder / name).mkdir()
        (cache.folder / name / "tokens").write_text("x")
    for name in (f"{c}.part", "words.part"):
        os.utime(cache.folder / name, (0, 0))  # a run that goes on may want newer ones
    whole |= {*others, f"{d}.part"}
    writing = lock_file(cache.folder / f"{e}.lock")
    cache.sweep()
    assert {path.name for path in cache.folder.iterdir()} == whole | {f"{e}.partial", f"{e}.lock"}
    os.close(writing)
    cache.sweep()
    assert {path.name for path in cache.folder.iterdir()} == whole


def test_nothing_is_removed_while_another_process_writes_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    cache, sources = (
        TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()),
        [Source(tmp_path / "a.txt")],
    )
    cache.open(sources)
    entry = cache.entry(sources)
    writing = lock_file(entry.with_suffix(".lock"))
    cache.remove(sources)
    assert entry.is_dir()
    assert is_locked(entry.with_suffix(".lock"))  # whose file is still that of the writer
    os.close(writing)
    cache.remove(sources)
    assert not list(cache.folder.iterdir())
    cache.remove(sources)  # of nothing, also where there is no cache
    shutil.rmtree(cache.folder)
    cache.remove(sources)


def test_there_are_as_many_helpers_as_free_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(folder=tmp_path, tokenizer=BytesTokenizer())
    for free, count in ((3 * helpers.HELPER_NBYTES, 1), (helpers.HELPER_NBYTES, 0)):
        monkeypatch.setattr(helpers, "free_host_nbytes", lambda: free)  # noqa: B023
        started = helpers.Helpers(cache, 2)
        started.write([Source(tmp_path / "none.txt")])
        assert len(started.processes) == count
        started.end()


def test_the_cache_is_written_once_also_by_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    asked, written = list[int](), list[int]()
    lock, encode = tokens_module.lock_file, tokens_module.encode_documents

    def locking(*args: Any, **more: Any) -> int:
        asked.append(1)
        return lock(*args, **more)

    def encode_when_all_wait(*args: Any) -> Any:
        written.append(1)
        assert comes_true(lambda: len(asked) == 8)
        return encode(*args)

    monkeypatch.setattr(tokens_module, "lock_file", locking)
    monkeypatch.setattr(tokens_module, "encode_documents", encode_when_all_wait)
    found: list[bytes] = []

    def open_it() -> None:
        found.append(
            bytes(
                TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer())
                .open([Source(tmp_path / "a.txt")])
                .values
            )
        )

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"hello\0"] * 8
    assert len(written) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()).open([Source(path)])
    path.write_text("two")  # as long as before
    os.utime(path, (1, 1))
    second = TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()).open([Source(path)])
    assert bytes(second.values) == b"two\0"
    assert first.digest != second.digest


def test_equal_text_elsewhere_has_an_equal_digest(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    digests = {
        TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer())
        .open([Source(tmp_path / name)])
        .digest
        for name in ("a.txt", "b.txt")
    }
    assert len(digests) == 1


def test_a_failure_leaves_no_cache_behind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("nonsense")
    for _ in range(2):
        with pytest.raises(DataError, match="not JSON"):
            TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()).open(
                [Source(tmp_path / "a.jsonl")]
            )
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"data\.cache: .*cache"):
        TokenCache(folder=tmp_path / "cache", tokenizer=BytesTokenizer()).open([Source(tmp_path / "a.txt")])


def test_a_long_tokenisation_logs_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("word " * 10)
    said: list[str] = []
    TokenCache(folder=tmp_path / "quick", tokenizer=BytesTokenizer()).open([*map(Source, files)], said.append)
    assert said == []
    monkeypatch.setattr(tokens_module, "LINES_EVERY_S", 0.0)
    TokenCache(folder=tmp_path / "slow", tokenizer=BytesTokenizer()).open([*map(Source, files)], said.append)
    assert said[0].startswith(f"tokenizing {files[0]}, 1 of 2: ")
    assert said[-1] == f"tokenizing {files[1]}, 2 of 2: 102 tokens so far"
    said.clear()
    TokenCache(folder=tmp_path / "slow", tokenizer=BytesTokenizer()).open(
        [*map(Source, files)], said.append
    )  # they are there
    assert said == []
