"""Probe sets are read strictly, and token ids are those that the model would see."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny, word_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import tracer
from tracer.errors import InputError
from tracer.models.catalogue import cached_folder
from tracer.probes import (
    MIN_USABLE,
    PROBE_KEYS,
    Probe,
    ProbeSet,
    TokenizedProbes,
    read_probes,
    shipped_folder,
    shipped_names,
    token_ids,
    tokenize,
)

LINE = {"prompt": "The capital of France is", "target": " Paris"}
CORPUS = [
    "The capital of France is Paris and the capital of Spain is Madrid",
    "The capital of Italy is Rome",
    "Paris Madrid Rome",
    "a b is",
    "法 国 的 首 都 是 巴 黎",
] * 20
WORDINGS = json.loads((shipped_folder() / "wordings.json").read_text(encoding="utf-8"))


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes, str], Path]:
    def write_file(data: bytes, name: str = "mine.jsonl") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write_file


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_a_jsonl_file_is_read_with_defaults_for_group_and_id(write):
    full = LINE | {"group": "g", "id": "x", "corrupt": "The capital of Italy is", "corrupt_target": " Rome"}
    probes = read_probes(write(b"\xef\xbb\xbf" + lines(LINE) + b"\r\n" + lines(full)))
    assert probes.probes == (Probe(**LINE, group="mine", id="mine-1"), Probe(**full))
    assert (probes.name, probes.shipped, probes.skipped, probes.groups) == ("mine", False, (), ("mine", "g"))
    assert len(probes) == 2
    assert [probe.id for probe in probes] == ["mine-1", "x"]


def test_a_line_separator_inside_a_text_does_not_end_the_line(write):
    probes = read_probes(write(lines(LINE | {"prompt": "one\u2028two"})))
    assert probes.probes[0].prompt == "one\u2028two"


def test_a_null_stands_for_an_absent_key(write):
    nulls = dict.fromkeys(PROBE_KEYS)
    by_text, by_ids = LINE | {"id": "a"}, {"prompt_ids": [3, 4], "target_id": 5}
    for source in ([nulls | by_text, nulls | by_ids], write(lines(nulls | by_text, nulls | by_ids))):
        probes = read_probes(source)
        group = "probes" if isinstance(source, list) else "mine"
        assert probes.probes == (
            Probe(**LINE, group=group, id="a"),
            Probe(prompt_ids=(3, 4), target_id=5, group=group, id=f"{group}-2"),
        )


def test_a_csv_file_keeps_the_space_of_a_target(write):
    data = '\ufeffprompt,target,group,corrupt,corrupt_target\n"Yes, or", no,g,,\n"a\nb", c,h,"d\ne", f\n'
    probes = read_probes(str(write(data.encode(), "mine.csv")))
    assert probes.probes == (
        Probe("Yes, or", " no", "g", "g-2"),
        Probe("a\nb", " c", "h", "h-3", "d\ne", " f"),
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{not json}\n", "not JSON"),
        (b"[1, 2]\n", "not an object"),
        (lines({"prompt": "x"}), "missing key 'target'"),
        (lines({"target": " x"}), "missing key 'prompt'"),
        (lines(LINE | {"answer": "x"}), "unknown key 'answer'"),
        (lines(LINE | {"prompt": ""}), "prompt is empty"),
        (lines(LINE | {"target": " "}), "target is empty"),
        (lines(LINE | {"target": 4}), "target must be text, got int 4"),
        (lines(LINE | {"prompt": None}), "missing key 'prompt'"),
        (lines(LINE | {"id": 7}), "id must be text"),
        (lines(LINE | {"group": ""}), "group is empty"),
        (lines(LINE | {"corrupt": "x"}), "come together"),
        (lines(LINE | {"id": "mine-1"}), "duplicate id 'mine-1'"),
        (b'{"prompt": "caf\xe9 is", "target": " x"}\n', "not valid UTF-8"),
        (b'{"prompt": "\\ud800 is", "target": " x"}\n', "not valid UTF-8"),
    ],
)
def test_a_bad_line_is_refused_with_file_number_and_reason_or_counted(write, bad, reason):
    path = write(lines(LINE) + bad + lines(LINE))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}:2: .*{re.escape(reason)}") as caught:
        read_probes(path)
    assert "\n" not in str(caught.value)
    probes = read_probes(path, skip_bad=True)
    assert [probe.id for probe in probes] == ["mine-1", "mine-3"]
    assert [skip.where for skip in probes.skipped] == [f"{path}:2"]
    assert reason in probes.skipped[0].reason


def test_bad_rows_of_a_csv_file_are_counted_with_their_line(write):
    path = write(b'prompt,target,id\na, b,x\na, b\n, c,y\ncaf\xe9, d,z\na, b,x\n"q\nq", e,w\n', "mine.csv")
    probes = read_probes(path, skip_bad=True)
    assert [probe.id for probe in probes] == ["x", "w"]
    where = [skip.where.rsplit(":", 1)[1] for skip in probes.skipped]
    reasons = " | ".join(skip.reason for skip in probes.skipped)
    assert where == ["3", "4", "5", "6"]
    assert re.fullmatch(r"2 columns.*\| prompt is empty \| .*not valid UTF-8.* \| duplicate id 'x'", reasons)


@pytest.mark.parametrize("header", ["prompt,answer", "prompt,prompt,target", "target,id"])
def test_a_csv_header_must_name_the_keys(write, header):
    with pytest.raises(InputError, match=r"mine\.csv:1: the header is"):
        read_probes(write(f"{header}\na,b,c\n".encode(), "mine.csv"), skip_bad=True)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("mine.jsonl", b"", "no probes in"),
        ("mine.jsonl", b"\n \n", "no probes in"),
        ("mine.csv", b"prompt,target\n", "no probes in"),
        ("mine.jsonl", None, "cannot read"),
        ("mine.txt", lines(LINE), "pass a .jsonl or .csv file"),
    ],
)
def test_a_file_without_probes_is_refused(tmp_path, name, data, message):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_probes(path)


def test_a_folder_is_no_probe_file(tmp_path):
    (tmp_path / "set.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot read"):
        read_probes(tmp_path / "set.jsonl")


def test_a_set_of_bad_lines_only_says_why(write):
    with pytest.raises(InputError, match=r"no probes in .* \(1 bad: not JSON"):
        read_probes(write(b"{\n"), skip_bad=True)


def test_an_unknown_name_suggests_close_ones():
    with pytest.raises(InputError, match="unknown probe set 'en-capital': did you mean en-capitals"):
        read_probes("en-capital")
    with pytest.raises(InputError, match="'xyzzy': pass one of english, chinese, all, en-"):
        read_probes("en-plurals,xyzzy")


def test_a_sequence_of_probes_and_mappings_is_read():
    probe = Probe("a", " b", "g", "one")
    probes = read_probes([probe, {"prompt": "c", "target": " d"}])
    assert probes.probes == (probe, Probe("c", " d", "probes", "probes-2"))
    assert read_probes(probes) is probes
    with pytest.raises(InputError, match="probe 2: duplicate id 'one'"):
        read_probes([probe, probe])
    with pytest.raises(InputError, match="no probes in the sequence"):
        read_probes([])


def test_groups_are_selected_by_name():
    probes = read_probes([LINE | {"group": group} for group in ("x", "y", "z")])
    assert probes.select(["z", "x"]).groups == ("x", "z")
    assert read_probes(probes, groups=["y"]).groups == ("y",)
    assert probes.select("x,y").groups == ("x", "y")
    with pytest.raises(InputError, match="no group 'w' in probe set 'probes': pass some of x, y, z"):
        probes.select(["x", "w"])
    with pytest.raises(InputError, match="no group was named"):
        probes.select([])


def test_collections_hold_their_sets_once():
    assert read_probes("chinese").groups == tuple(n for n in shipped_names() if n.startswith("zh-"))
    assert read_probes("all").groups == LANGUAGES
    both = read_probes("en-plurals, english")
    assert both.groups[0] == "en-plurals"
    assert sorted(both.groups) == [n for n in shipped_names() if n.startswith("en-")]
    assert both.shipped


# --- Tokens ----------------------------------------------------------------------------------------------------------


def trained(model: models.BPE, pre_tokenizer, decoder, specials: list[str], **options) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(special_tokens=specials, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    return trained(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        ["<s>", "</s>"],
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


def with_template(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    specials = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def gpt() -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds nothing; 巴黎 is several byte fragments."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def llama() -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with BOS and the dummy prefix space."""
    tokenizer = trained(
        models.BPE(unk_token="<unk>"),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(),
        ["<unk>", "<s>", "</s>"],
        vocab_size=200,
    )
    fast = with_template(tokenizer, "<s> $A")
    fast.unk_token = "<unk>"
    return fast


@pytest.fixture(scope="module")
def with_eos() -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds BOS and appends EOS."""
    return with_template(byte_level(), "<s> $A </s>")


def one(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, **options) -> TokenizedProbes:
    return tokenize(read_probes([{"prompt": prompt, "target": answer}]), tokenizer, **options)


def texts(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


def test_a_bos_stands_in_front_once_and_nothing_is_appended(gpt, llama, with_eos):
    assert texts(gpt, token_ids(gpt, "Paris")) == ["Paris"]
    for tokenizer, word in ((llama, "▁Paris"), (with_eos, "Paris")):
        bos = tokenizer.bos_token_id
        assert tokenizer.encode("<s>Paris")[:2] == [bos, bos]
        assert texts(tokenizer, token_ids(tokenizer, "Paris")) == ["<s>", word]
        assert token_ids(tokenizer, "<s>Paris").count(bos) == 1
        assert token_ids(tokenizer, "<s><s>Paris").count(bos) == 1
    assert with_eos.encode("Paris")[-1] == with_eos.eos_token_id


def test_a_prefix_of_several_special_tokens_is_not_doubled_either():
    tokenizer = with_template(byte_level(), "</s> <s> $A")
    assert texts(tokenizer, token_ids(tokenizer, "Paris")) == ["</s>", "<s>", "Paris"]
    assert texts(tokenizer, token_ids(tokenizer, "</s><s>Paris")) == ["</s>", "<s>", "Paris"]


def test_an_appended_eos_stands_neither_before_nor_in_the_target(with_eos):
    item = one(with_eos, "The capital of France is", " Paris").items[0]
    assert texts(with_eos, item.prompt_ids) == ["<s>", "The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert texts(with_eos, item.target_ids) == ["ĠParis"]


def test_the_leading_space_of_a_target_counts_in_a_byte_level_vocabulary(gpt):
    with_space = one(gpt, "The capital of France is", " Paris")
    assert texts(gpt, with_space.items[0].target_ids) == ["ĠParis"]
    assert with_space.warnings == ()
    without = one(gpt, "The capital of France is", "Paris")
    assert texts(gpt, without.items[0].target_ids) == ["Paris"]
    assert "begins without a space after 's'" in without.warnings[0].reason


def test_a_prompt_that_ends_with_a_space_is_refused_or_warned_about(gpt, llama):
    for tokenizer in (gpt, llama):
        with pytest.raises(InputError, match=r"probes-1: the prompt .* ends with a space .* move the space"):
            one(tokenizer, "The capital of France is ", "Paris")
    # Here the tokenizer keeps the space apart, so the ids are sound and only the text is suspect.
    kept = one(gpt, "The capital of France is ", " Paris")
    assert texts(gpt, kept.items[0].target_ids) == ["ĠParis"]
    assert "ends with a space" in kept.warnings[0].reason


def test_a_dummy_prefix_gives_one_target_with_and_without_the_space(llama):
    spaced, glued = (one(llama, "The capital of France is", target) for target in (" Paris", "Paris"))
    assert texts(llama, spaced.items[0].target_ids) == ["▁Paris"]
    assert glued.items[0].target_ids == spaced.items[0].target_ids
    assert glued.items[0].prompt_ids == spaced.items[0].prompt_ids
    assert glued.warnings
    assert not spaced.warnings


def test_a_dummy_prefix_puts_no_space_where_the_script_has_none(llama):
    item = one(llama, "法国的首都是", "巴黎", target="joint").items[0]
    assert "▁" not in "".join(texts(llama, item.target_ids))
    assert llama.decode(list(item.target_ids)) == "巴黎"


def test_a_prompt_inside_a_token_is_refused(gpt):
    with pytest.raises(InputError, match="joins the end of the prompt 'The capit' to the target 'al'"):
        one(gpt, "The capit", "al")


def test_a_target_of_several_tokens_needs_a_declared_reading(gpt):
    prompt = "The capital of France is"
    with pytest.raises(InputError, match=r"probes-1: target ' Paris Rome' has 2 tokens \(' Paris' ' Rome'\)") as caught:
        one(gpt, prompt, " Paris Rome")
    assert "pass target='first' or 'joint'" in str(caught.value)
    assert texts(gpt, one(gpt, prompt, " Paris Rome", target="first").items[0].target_ids) == ["ĠParis"]
    assert texts(gpt, one(gpt, prompt, " Paris Rome", target="joint").items[0].target_ids) == ["ĠParis", "ĠRome"]
    with pytest.raises(InputError, match="target='last': pass one of single, first, joint"):
        # Under pytest the annotations are checked before the body; users have no such check.
        inspect.unwrap(tokenize)(read_probes([LINE]), gpt, target="last")


def test_the_first_fragment_of_a_character_is_flagged():
    # Without merges every byte is a token, so the first one of a Chinese character decodes to U+FFFD.
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(InputError, match="has 3 tokens"):
        one(fast, "雨是", "水")
    first = one(fast, "雨是", "水", target="first")
    assert "fragment of a character" in first.warnings[0].reason
    assert len(first.items[0].target_ids) == 1
    joint = one(fast, "雨是", "水", target="joint")
    assert len(joint.items[0].target_ids) == 3
    assert joint.warnings == ()


def test_texts_without_tokens_are_refused(gpt):
    stripping = byte_level()
    stripping.normalizer = normalizers.Replace("\u200b", "")
    tokenizer = with_template(stripping, "<s> $A")
    with pytest.raises(InputError, match="has no tokens"):
        one(tokenizer, "\u200b", " Paris")
    with pytest.raises(InputError, match="adds no token"):
        one(tokenizer, "The capital of France is", "\u200b")
    with pytest.raises(InputError, match="beginning-of-text token"):
        one(gpt, "The capital of France is", "<s>")


def test_a_target_outside_the_vocabulary_is_refused(llama):
    with pytest.raises(InputError, match="not in the tokenizer's vocabulary"):
        one(llama, "The capital of France is", " Ж")
    assert "not in the tokenizer's vocabulary" in one(llama, "Ж is", " Paris").warnings[0].reason


def test_unusable_probes_of_a_shipped_set_are_skipped_and_counted(gpt):
    good = [Probe("The capital of France is", " Paris", "x", f"x-{i}") for i in range(MIN_USABLE)]
    bad = [Probe("The capital of Spain is", " Paris Rome", "y", f"y-{i}") for i in range(3)]
    few = [Probe("The capital of Italy is", " Rome", "z", f"z-{i}") for i in range(MIN_USABLE - 1)]
    probes = ProbeSet("s", (*good, *bad, *few), shipped=True)
    tokens = tokenize(probes, gpt)
    assert tokens.usable() == {"x": MIN_USABLE, "y": 0, "z": MIN_USABLE - 1}
    assert tokens.unmeasurable == ("y", "z")
    assert [skip.where for skip in tokens.skipped] == ["y-0", "y-1", "y-2"]
    assert "2 tokens" in tokens.skipped[0].reason
    assert (len(tokens), tokens.reading) == (2 * MIN_USABLE - 1, "single")
    own = ProbeSet("s", probes.probes)
    with pytest.raises(InputError, match="probe y-0"):
        tokenize(own, gpt)
    assert tokenize(own, gpt, skip_bad=True) == tokens


def test_a_corrupt_prompt_is_kept_only_where_it_can_be_patched(gpt):
    def corrupted(corrupt: str, corrupt_target: str) -> TokenizedProbes:
        record = LINE | {"corrupt": corrupt, "corrupt_target": corrupt_target}
        return tokenize(read_probes([record]), gpt)

    tokens = corrupted("The capital of Spain is", " Madrid")
    assert texts(gpt, tokens.items[0].corrupt_ids)[-2:] == ["ĠSpain", "Ġis"]
    assert texts(gpt, (tokens.items[0].corrupt_target_id,)) == ["ĠMadrid"]
    assert tokens.corrupt_skipped == ()
    for corrupt, target, reason in (
        ("The capital of of Spain is", " Madrid", "has 6 tokens where the prompt has 5"),
        ("The capital of Spain is", " Madrid Rome", "has 2 tokens"),
        ("The capital of Spain is", " Paris", "equals the clean one"),
        ("The capital of Spain is ", "Madrid", "ends with a space"),
    ):
        tokens = corrupted(corrupt, target)
        assert (tokens.items[0].corrupt_ids, tokens.items[0].corrupt_target_id) == (None, None)
        assert reason in tokens.corrupt_skipped[0].reason


# --- Probes as token ids ---------------------------------------------------------------------------------------------


def ids_of(number: int) -> list[int]:
    return [3 + (7 * number + 5 * i) % 120 for i in range(4 + number % 4)]


AS_TEXT = [
    Probe(" ".join(f"w{i}" for i in ids_of(n)), f" w{20 + n % 9}", f"g{n % 2}", f"p{n}", f"w{n} w4", " w5")
    for n in range(24)
]
AS_IDS = [
    Probe(
        prompt_ids=tuple(ids_of(n)),
        target_id=20 + n % 9,
        group=f"g{n % 2}",
        id=f"p{n}",
        corrupt_ids=(n, 4),
        corrupt_target_id=5,
    )
    for n in range(24)
]


def test_ids_are_kept_as_integers_whatever_they_come_in():
    probe = Probe(prompt_ids=(3, 4), target_id=5, id="x")
    assert Probe(prompt_ids=[3, 4], target_id=5, id="x") == probe
    for prompt, target in ((np.array([3, 4]), torch.tensor(5)), ([np.int64(3), 4], np.int32(5))):
        same = read_probes([{"prompt_ids": prompt, "target_id": target, "id": "x"}]).probes[0]
        assert same == probe
        assert {type(i) for i in (*same.prompt_ids, same.target_id)} == {int}
    probe = replace(probe, id="")
    read = read_probes([probe, Probe(prompt_ids=[6], target_ids=[7, 8], group="h")])
    assert [probe.id for probe in read] == ["probes-1", "h-2"]
    assert read.probes[1].target_ids == (7, 8)


def test_a_jsonl_file_may_hold_ids(write):
    records = [
        {"prompt_ids": [3, 4], "target_id": 5},
        {"prompt_ids": [6], "target_ids": [7, 8], "group": "h", "corrupt_ids": [9], "corrupt_target_id": 1},
        LINE,
    ]
    probes = read_probes(write(lines(*records))).probes
    assert probes[0] == Probe(prompt_ids=(3, 4), target_id=5, group="mine", id="mine-1")
    pair = {"corrupt_ids": (9,), "corrupt_target_id": 1}
    assert probes[1] == Probe(prompt_ids=(6,), target_ids=(7, 8), group="h", id="h-2", **pair)
    assert probes[2] == Probe(**LINE, group="mine", id="mine-3")
    with pytest.raises(InputError, match=r"mine\.csv:1: the header is"):
        read_probes(write(b"prompt_ids,target_id\n3,4\n", "mine.csv"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_ids": [3, -1], "target_id": 5}, "prompt_ids must hold token ids, integers from 0 on, got int -1"),
        ({"prompt_ids": [3], "target_id": -5}, "target_id must hold token ids, integers from 0 on, got int -5"),
        ({"prompt_ids": [3, 4.0], "target_id": 5}, "got float 4.0"),
        ({"prompt_ids": [3], "target_id": 5.0}, "got float 5.0"),
        ({"prompt_ids": [3], "target_id": True}, "got bool True"),
        ({"prompt_ids": [[3, 4]], "target_id": 5}, r"got list \[3, 4\]"),
        ({"prompt_ids": "34", "target_id": 5}, "prompt_ids must be a list of token ids, got str '34'"),
        ({"prompt_ids": 34, "target_id": 5}, "prompt_ids must be a list of token ids, got int 34"),
        ({"prompt_ids": [], "target_id": 5}, "prompt_ids is empty"),
        ({"prompt_ids": [3], "target_ids": []}, "target_ids is empty"),
        ({"prompt_ids": [3]}, "missing key 'target_id'"),
        ({"target_ids": [3]}, "missing key 'prompt_ids'"),
        ({"prompt_ids": [3], "target_id": 5, "target_ids": [5]}, "target_id and target_ids in one probe"),
        ({"prompt_ids": [3], "target": " x"}, "target and prompt_ids in one probe: pass .* not both"),
        ({"prompt": "x", "target": " x", "corrupt_ids": [3]}, "prompt and corrupt_ids in one probe"),
        ({"prompt_ids": [3], "target_id": 5, "corrupt_ids": [4]}, "corrupt_ids and corrupt_target_id come together"),
        ({}, "missing key 'prompt'"),
        ({"prompt_ids": [3], "target_id": None}, "missing key 'target_id'"),
        ({"prompt_ids": [3], "target_id": 5, "corrupt_ids": [4], "corrupt_target_id": None}, "come together"),
    ],
)
def test_a_bad_probe_of_ids_is_refused_in_python_and_in_a_file(write, fields, reason):
    for source in ([fields], write(lines(fields))):
        with pytest.raises(InputError, match=reason) as caught:
            read_probes(source)
        assert "\n" not in str(caught.value)


def test_a_probe_checks_itself():
    with pytest.raises(InputError, match="prompt_ids must hold token ids, integers from 0 on, got int -1"):
        Probe(prompt_ids=(-1,), target_id=5)
    with pytest.raises(InputError, match="prompt and prompt_ids in one probe"):
        Probe("x", prompt_ids=(1,), target_id=5)
    with pytest.raises(InputError, match="missing key 'target'"):
        Probe("x")


def test_tensors_of_a_batch_are_refused_in_one_line():
    with pytest.raises(InputError, match="got Tensor tensor") as caught:
        read_probes([{"prompt_ids": torch.zeros(2, 40, dtype=torch.long), "target_id": 1}])
    assert "\n" not in str(caught.value)


def test_ids_are_taken_as_they_are_with_and_without_a_tokenizer(with_eos):
    probes = [
        Probe(prompt_ids=(3, 4), target_ids=(5, 6), id="long", corrupt_ids=(7, 8), corrupt_target_id=9),
        Probe(prompt_ids=(3, 4), target_id=5, id="short", corrupt_ids=(7,), corrupt_target_id=9),
    ]
    for tokenizer in (None, with_eos):
        tokens = tokenize(read_probes(probes), tokenizer, target="joint")
        long, short = tokens.items
        assert (long.prompt_ids, long.target_ids) == ((3, 4), (5, 6))
        assert (long.corrupt_ids, long.corrupt_target_id) == ((7, 8), 9)
        assert (short.target_ids, short.corrupt_ids) == ((5,), None)
        assert [skip.reason for skip in tokens.corrupt_skipped] == [
            "corrupt prompt has 1 tokens where the prompt has 2"
        ]
        assert tokens.warnings == ()
        assert tokenize(read_probes(probes), tokenizer, target="first").items[0].target_ids == (5,)
        with pytest.raises(InputError, match=r"probe long: target \(5, 6\) has 2 tokens .* pass target='first'"):
            tokenize(read_probes(probes), tokenizer)


def test_text_needs_a_tokenizer_also_where_the_set_is_shipped():
    for probes in (read_probes([AS_IDS[0], Probe(**LINE, id="words")]), read_probes("en-capitals")):
        with pytest.raises(InputError, match=r"is text and the model has no tokenizer: pass tokenizer= to load, or"):
            tokenize(probes, None, skip_bad=True)


def test_the_same_probes_by_text_and_by_ids_give_identical_arrays(tmp_path):
    settings = {"ablations": ["resample"], "progress": False}
    by_text, by_ids, bare = (
        tracer.trace(tracer.load(tiny("llama"), tokenizer), probes, **settings)
        for tokenizer, probes in ((word_tokenizer(), AS_TEXT), (word_tokenizer(), AS_IDS), (None, AS_IDS))
    )
    for other in (by_ids, bare):
        assert other.arrays.keys() == by_text.arrays.keys()
        assert all(np.array_equal(array, by_text.arrays[name]) for name, array in other.arrays.items())
        assert other.probes["answer_id"].equals(by_text.probes["answer_id"])
        assert other.probes["prompt_ids"].tolist() == [ids_of(n) for n in range(24)]
    assert by_ids.probes["prompt"].tolist() == [probe.prompt for probe in AS_TEXT]
    assert by_ids.probes["answer"].equals(by_text.probes["answer"])
    assert by_text.probes["answer"].tolist() == [f"w{i}" for i in by_text.probes["answer_id"]]
    assert bare.probes[["prompt", "target", "answer"]].isna().all(axis=None)


def test_a_model_without_tokenizer_is_traced_saved_reloaded_and_drawn(tmp_path):
    path = tmp_path / "ids.jsonl"
    keys = ("prompt_ids", "target_id", "group", "id")
    path.write_bytes(lines(*({key: getattr(probe, key) for key in keys} for probe in AS_IDS)))
    result = tracer.trace(tracer.load(tiny("mamba2")), path, out=tmp_path / "run", progress=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "probes.jsonl").read_text().splitlines()]
    assert rows[3]["prompt_ids"] == ids_of(3)
    assert [rows[3][key] for key in ("prompt", "target", "answer")] == [None] * 3
    again = tracer.TraceResult.load(tmp_path / "run")
    assert again.probes.equals(result.probes)
    assert again.summary() == result.summary()
    assert "24 probes in 2 groups (ids)" in again.summary()
    for figure in ("joint", "lens", "fragility", "evolution"):
        assert again.plot(figure).axes
    with pytest.raises(InputError, match=r"probe x has token 500, but .* pass the tokenizer, or the token ids"):
        tracer.trace(tracer.load(tiny("mamba2")), [Probe(prompt_ids=[500], target_id=1, id="x")], progress=False)


def cached_tokenizer(name: str) -> PreTrainedTokenizerBase:
    folder = cached_folder(name)
    if folder is None:
        pytest.skip(f"{name} is not in the cache: fetch it with `tracer fetch {name}`")
    return AutoTokenizer.from_pretrained(folder)


def test_smollm2_reads_targets_as_measured():
    tokenizer = cached_tokenizer("smollm2-135m-instruct-q4_1")
    prompt = "The capital of France is"
    item = one(tokenizer, prompt, " Paris").items[0]
    assert item.target_ids == (7042,)
    assert item.prompt_ids == tuple(tokenizer.encode(prompt, add_special_tokens=False))
    assert one(tokenizer, prompt, "Paris").items[0].target_ids == (38634,)
    assert token_ids(tokenizer, prompt + " ")[-1] == 216
    with pytest.raises(InputError, match="ends with a space"):
        one(tokenizer, prompt + " ", "Paris")
    for target, count in (("水", 3), ("北京", 4)):
        with pytest.raises(InputError, match=f"has {count} tokens"):
            one(tokenizer, "答案是：", target)
        assert "fragment" in one(tokenizer, "答案是：", target, target="first").warnings[0].reason
    tokens = tokenize(read_probes("all"), tokenizer)
    assert {"zh-capitals", "zh-knowledge"} <= set(tokens.unmeasurable)
    assert sum(group.startswith("en-") and n >= 30 for group, n in tokens.usable().items()) >= 8


def test_gemma_reads_targets_as_measured():
    tokenizer = cached_tokenizer("gemma3-270m-q4_k_m")
    assert tokenizer.encode("<bos>hi")[:2] == [2, 2]
    assert token_ids(tokenizer, "<bos>hi") == token_ids(tokenizer, "hi") == (2, 2202)
    item = one(tokenizer, "法国的首都是", "巴黎").items[0]
    assert (item.prompt_ids[0], item.prompt_ids.count(2), item.target_ids) == (2, 1, (142253,))
    assert one(tokenizer, "中国的首都是", "北京").items[0].target_ids == (32707,)
    tokens = tokenize(read_probes("all"), tokenizer)
    assert min(tokens.usable().values()) >= 30
    assert tokens.unmeasurable == ()
    assert tokens.warnings == ()


# --- The shipped sets ------------------------------------------------------------------------------------------------


LANGUAGES = tuple(name for name in shipped_names() if "/" not in name)
"""The sets about the real world; those of the zoo have their own tests."""


def contains(text: str, word: str) -> bool:
    """Whether a text holds a word: as a whole word in Latin script and digits, anywhere in Chinese."""
    word = word.strip()
    return bool(re.search(rf"\b{re.escape(word)}\b", text)) if word.isascii() else word in text


def test_there_are_enough_groups():
    assert sum(name.startswith("en-") for name in LANGUAGES) >= 8
    assert sum(name.startswith("zh-") for name in LANGUAGES) >= 3
    probes = read_probes("all").probes
    assert len({probe.id for probe in probes}) == len({probe.prompt for probe in probes}) == len(probes)


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_shipped_set_keeps_its_rules(name):
    probes = read_probes(name)
    targets = {probe.target for probe in probes}
    entry = WORDINGS[name]
    before, after = entry["chosen"].split("{}")
    assert probes.groups == (name,)
    assert len(probes) >= 30
    assert len(targets) >= 3
    answers = {probe.prompt: probe.target for probe in probes}
    for probe in probes:
        assert probe.prompt.startswith(before)
        assert probe.prompt.endswith(after)
        assert probe.prompt[-1] != " "
        assert probe.target.startswith(" ") == (name.startswith("en-") and name != "en-arithmetic")
        if probe.corrupt is not None:
            assert probe.corrupt != probe.prompt
            assert probe.corrupt_target != probe.target
            assert answers[probe.corrupt] == probe.corrupt_target
    assert sum(probe.corrupt is not None for probe in probes) >= 0.9 * len(probes)
    assert [target for target in targets if contains(before, target)] == []


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_wording_was_chosen_on_other_facts(name):
    entry = WORDINGS[name]
    assert entry["chosen"] in entry["tried"]
    asked = {probe.prompt for probe in read_probes(name)}
    assert not asked & {entry["chosen"].format(subject) for subject, _ in entry["development"]}
