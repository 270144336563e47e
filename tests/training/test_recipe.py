"""Recipes: everything that is refused before a model is opened, and what reaches the Trainer."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tracer.errors import InputError
from tracer.recipes import Dumper, yaml_value
from tracer.training.output import recipe_data
from tracer.training.recipe import (
    FIXED,
    OURS,
    PACKINGS,
    REFUSED,
    Recipe,
    Retrace,
    TextSource,
    read_recipe,
)

BASE: dict[str, Any] = {
    "model": "zoo/transformer-4",
    "plan": {"rule": "shallow:2"},
    "text": {"new": {"path": "new.txt"}},
    "output_dir": "out",
}

WHOLE: dict[str, Any] = {
    "model": "zoo/transformer-4",
    "plan": {"rule": "shallow:2", "head": "freeze", "allow_degenerate": True},
    "text": {
        "new": {"path": "new.jsonl", "field": "body", "weight": 0.8, "held_out": 0.05, "limit": 100},
        "旧": {"dataset": "some/thing", "config": "en", "split": "train", "streaming": True, "weight": 0.2},
        "book": {"path": "book.txt", "documents": "paragraph"},
    },
    "evaluate": {"kept": {"path": "kept.parquet"}},
    "dtype": "bfloat16",
    "revision": "v1",
    "block_size": 64,
    "packing": "none",
    "retrace": {"every": 5, "probes": "zoo/held", "limit": 3, "ablations": "zero,mean"},
    "max_loss_rise": 1.5,
    "output_dir": "out",
    "max_steps": 20,
    "learning_rate": 1e-05,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 0.5},
    "seed": 7,
}


def refusal(data: Any, **more: Any) -> str:
    """The one line by which a recipe is refused."""
    with pytest.raises(InputError) as caught:
        read_recipe(data, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def recipe(**changes: Any) -> Recipe:
    return read_recipe(BASE | changes)


def text(**entry: Any) -> dict[str, Any]:
    return {"text": {"new": {"path": "new.txt"} | entry}}


def file(folder: Path, content: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def with_lines(folder: Path, lines: str) -> Path:
    return file(folder, yaml.safe_dump(BASE) + lines + "\n")


def test_a_recipe_says_what_its_file_says(tmp_path):
    path = file(tmp_path, yaml.safe_dump(WHOLE, allow_unicode=True, sort_keys=False))
    found = read_recipe(path)
    assert found == read_recipe(str(path)) == read_recipe(WHOLE)
    assert found.model == "zoo/transformer-4"
    assert found.plan == WHOLE["plan"]
    assert found.text == {
        "new": TextSource(path="new.jsonl", field="body", weight=0.8, held_out=0.05, limit=100),
        "旧": TextSource(dataset="some/thing", config="en", streaming=True, weight=0.2),
        "book": TextSource(path="book.txt", documents="paragraph"),
    }
    assert [source.name for source in found.text.values()] == ["new.jsonl", "some/thing", "book.txt"]
    assert found.evaluate == {"kept": TextSource(path="kept.parquet")}
    assert found.retrace == Retrace(every=5, probes="zoo/held", limit=3, ablations="zero,mean")
    assert (found.dtype, found.revision, found.block_size, found.packing) == ("bfloat16", "v1", 64, "none")
    assert found.arguments == {
        key: WHOLE[key]
        for key in ("output_dir", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "seed")
    }
    assert found.output_dir == Path("out")
    assert (found.seed, recipe().seed) == (7, 42)


def test_defaults_are_as_documented():
    found = recipe()
    assert (found.dtype, found.block_size, found.packing, found.max_loss_rise) == ("float32", 1024, "packed", 2.0)
    assert (found.retrace, found.revision, found.trust_remote_code, dict(found.evaluate)) == (None, None, False, {})
    source = found.text["new"]
    assert (source.split, source.field, source.documents, source.weight) == ("train", "text", "document", 1.0)
    assert (source.held_out, source.limit, source.streaming) == (0.0, None, False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lerning_rate": 1.0}, "the recipe: unknown key 'lerning_rate'; did you mean learning_rate?"),
        ({"blok_size": 64}, "the recipe: unknown key 'blok_size'; did you mean block_size?"),
        (text(feild="body"), "the recipe: text.new: unknown key 'feild'; did you mean field?"),
        ({"evaluate": {"b": {"path": "x", "limt": 3}}}, "evaluate.b: unknown key 'limt'; did you mean limit?"),
        ({"retrace": {"every": 3, "probs": "x"}}, "retrace: unknown key 'probs'; did you mean probes?"),
        ({"qqqq": 1}, "the recipe: unknown key 'qqqq'"),
        ({"arguments": {"learning_rate": 1.0}}, "unknown key 'arguments'"),
        ({"_n_gpu": 2}, "unknown key '_n_gpu'"),
        ({3: 4}, "unknown key 3"),
        ({None: 4}, "unknown key None"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(changes, why):
    assert refusal(BASE | changes).endswith(why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": 5}, "model is 5: pass a text"),
        ({"plan": [1]}, r"plan is \[1\]: pass a text or keys and values"),
        ({"plan": None}, "plan is None: pass a text or keys and values"),
        ({"text": ["new.txt"]}, r"text is \['new.txt'\]: pass keys and values"),
        ({"text": None}, "text is None: pass keys and values"),
        ({"text": {"new": "new.txt"}}, "text.new is 'new.txt': pass keys and values"),
        ({"evaluate": [1]}, "evaluate is .1.: pass keys and values"),
        ({"retrace": 5}, "retrace is 5: pass keys and values"),
        ({"retrace": {"every": "often"}}, "retrace: every is 'often': pass a whole number"),
        ({"retrace": {"every": 3, "ablations": ["zero"]}}, "retrace: ablations is .*: pass a text"),
        ({"block_size": "64"}, "block_size is '64': pass a whole number"),
        ({"block_size": 64.0}, "block_size is 64.0: pass a whole number"),
        ({"block_size": True}, "block_size is True: pass a whole number"),
        ({"max_loss_rise": True}, "max_loss_rise is True: pass a number"),
        ({"max_loss_rise": "2"}, "max_loss_rise is '2': pass a number"),
        ({"trust_remote_code": "yes"}, "trust_remote_code is 'yes': pass true or false"),
        ({"trust_remote_code": 1}, "trust_remote_code is 1: pass true or false"),
        ({"revision": 100000}, "revision is 100000: pass a text"),
        (text(weight="much"), "text.new: weight is 'much': pass a number"),
        (text(limit=1.5), "text.new: limit is 1.5: pass a whole number"),
        (text(streaming="yes"), "text.new: streaming is 'yes': pass true or false"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast': pass a number"),
        ({"learning_rate": "1e-4"}, "learning_rate is '1e-4': pass a number"),
        ({"learning_rate": True}, "learning_rate is True: pass a number"),
        ({"learning_rate": None}, "learning_rate is None: pass a number"),
        ({"max_steps": 10.0}, "max_steps is 10.0: pass a whole number"),
        ({"bf16": "true"}, "bf16 is 'true': pass true or false"),
        ({"bf16": 1}, "bf16 is 1: pass true or false"),
        ({"seed": True}, "seed is True: pass a whole number"),
        ({"output_dir": 3}, "output_dir is 3: pass a text"),
        ({"optim": 3}, "optim is 3: pass a text"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing is 'yes': pass true or false"),
        ({"fsdp": ["full_shard"]}, "fsdp is .*: pass true or false or a text"),
        ({"fsdp_config": 3}, "fsdp_config is 3: pass keys and values or a text"),
        ({"report_to": 3}, "report_to is 3: pass a text or a list"),
        ({"include_for_metrics": "loss"}, "include_for_metrics is 'loss': pass a list"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused(changes, why):
    with pytest.raises(InputError, match=f"^the recipe: {why}$"):
        read_recipe(BASE | changes)


def test_whole_numbers_stand_for_others():
    found = recipe(learning_rate=1, max_loss_rise=3, neftune_noise_alpha=5, **text(weight=2, held_out=0))
    values = (
        found.arguments["learning_rate"],
        found.arguments["neftune_noise_alpha"],
        found.max_loss_rise,
        found.text["new"].weight,
        found.text["new"].held_out,
    )
    assert values == (1.0, 5.0, 3.0, 2.0, 0.0)
    assert all(isinstance(value, float) for value in values)
    steps = recipe(save_steps=50).training_arguments(progress=False).save_steps
    assert (steps, type(steps)) == (50, int)  # a number of steps, not a share of them


@pytest.mark.parametrize("key", ["model", "plan", "text", "output_dir"])
def test_what_is_missing_is_named(key):
    why = refusal({name: value for name, value in BASE.items() if name != key})
    expected = "names no output_dir: say where the model goes" if key == "output_dir" else f": {key} is missing"
    assert why.endswith(expected)
    assert refusal(BASE | {"retrace": {}}).endswith("retrace: every is missing")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"text": {}}, "names no text to train on"),
        ({"dtype": "float16"}, "gradients leave its range; pass float32 with fp16: true, or bfloat16"),
        ({"dtype": "float8"}, "unknown dtype 'float8': pass one of float32, bfloat16"),
        ({"packing": "loose"}, "unknown packing 'loose': pass one of packed, isolated, none"),
        ({"block_size": 1}, "block_size 1: pass at least 2 tokens"),
        ({"block_size": 0}, "block_size 0: pass at least 2 tokens"),
        ({"max_loss_rise": 0}, "max_loss_rise 0.0: pass a number above 0"),
        ({"max_loss_rise": float("nan")}, "max_loss_rise nan: pass a number above 0"),
        ({"retrace": {"every": 0}}, "retrace: every 0: pass at least 1 step"),
        (text(weight=0), "text.new: weight 0.0: pass a number above 0, or leave the text out"),
        (text(weight=-1), "weight -1.0: pass a number above 0"),
        (text(weight=float("nan")), "weight nan: pass a number above 0"),
        (text(held_out=1), "held_out 1.0: pass a share of the documents, from 0 to below 1"),
        (text(held_out=-0.1), "held_out -0.1: pass a share"),
        (text(held_out=float("nan")), "held_out nan: pass a share"),
        (text(limit=0), "limit 0: pass at least 1"),
        (text(dataset="some/thing"), "either path: or dataset:, and not both"),
        ({"text": {"new": {"field": "body"}}}, "either path: or dataset:, and not both"),
        (text(documents="sentence"), "unknown documents 'sentence': pass one of document, paragraph, line"),
        (text(streaming=True), "text 'new' is streamed, so that its length is not known: pass max_steps"),
        (text(streaming=True) | {"max_steps": -1}, "is streamed, .*: pass max_steps"),
        (text(streaming=True, held_out=0.1) | {"max_steps": 5}, "held_out needs a text that is read whole"),
        (
            text(held_out=0.1) | {"evaluate": {"new": {"path": "other.txt"}}},
            "'new' is held out of text and named under evaluate: give one another name",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(changes, why):
    with pytest.raises(InputError, match=f"^the recipe: .*{why}"):
        read_recipe(BASE | changes)


def test_the_neighbours_of_what_is_refused_are_not():
    assert recipe(**text(streaming=True), max_steps=1).text["new"].streaming
    assert recipe(**text(), evaluate={"new": {"path": "other.txt"}}).evaluate  # the same name without holding out
    assert recipe(**text(held_out=0.99, limit=1), block_size=2).block_size == 2
    assert recipe(retrace=None).retrace is None
    assert [recipe(packing=packing).packing for packing in PACKINGS] == ["packed", "isolated", "none"]


@pytest.mark.parametrize("key", REFUSED)
def test_refused_keys_say_what_to_do_instead(key):
    assert refusal(BASE | {key: True}) == f"the recipe: {key} cannot be set: {REFUSED[key]}"


@pytest.mark.parametrize("key", FIXED)
def test_fixed_keys_cannot_be_set_otherwise(key):
    other = "no" if isinstance(FIXED[key], str) else not FIXED[key]
    assert refusal(BASE | {key: other}) == f"the recipe: {key} is always {FIXED[key]!r} here: leave it out"
    assert recipe(**{key: FIXED[key]}).arguments[key] == FIXED[key]
    past_the_reader = Recipe("m", "plan.json", {"new": TextSource(path="x")}, {"output_dir": "out", key: other})
    assert getattr(past_the_reader.training_arguments(progress=False), key) == FIXED[key]


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.e-4", "0.1e-3", ".1e-3", "+1e-4", "1.0e-4", "0.0001"])
def test_numbers_are_read_as_people_write_them(tmp_path, written):
    assert read_recipe(with_lines(tmp_path, f"learning_rate: {written}")).arguments["learning_rate"] == 1e-4
    assert yaml_value(written) == 1e-4


def test_values_of_the_command_line_are_those_of_a_file():
    values = ["12", "-1e3", "true", "null", "cosine", "[1, 2]", "{a: 1e-2}", "1e-4x", "e4", "1e"]
    expected = [12, -1000.0, True, None, "cosine", [1, 2], {"a": 0.01}, "1e-4x", "e4", "1e"]
    assert [yaml_value(value) for value in values] == expected
    with pytest.raises(InputError, match="is not YAML: while parsing"):
        yaml_value("[1, 2")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("- a\n- b\n", "holds no keys: see --example for one"),
        ("", "holds no keys"),
        ("just words", "holds no keys"),
        ("a: [1\nb: {", "is not YAML: while parsing a flow sequence .* line 1"),
        ("a:\n\t- b", r"is not YAML: .* '\\t' that cannot start any token"),
        (b"model: \xff\xfe", "is not YAML: 'utf-8' codec can't decode byte 0xff"),
        (b"model: a\x00b", "is not YAML: unacceptable character"),
        ("seed: !!python/object/apply:os.getcwd []", "is not YAML: could not determine a constructor"),
        ("a: 1\n---\na: 2\n", "is not YAML: expected a single document"),
        ("seed: 1\nmodel: m\nseed: 2\n", "is not YAML: key 'seed' stands twice"),
        ("text:\n  a: {path: b, path: c}\n", "is not YAML: key 'path' stands twice"),
        ("text:\n  a: {path: b}\n  a: {path: c}\n", "is not YAML: key 'a' stands twice"),
    ],
)  # fmt: skip
def test_files_that_are_no_recipe_are_refused_in_one_line(tmp_path, content, why):
    path = file(tmp_path, content)
    message = refusal(path)
    assert message.startswith(f"the recipe {str(path)!r} ")
    with pytest.raises(InputError, match=why):
        read_recipe(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    nowhere = tmp_path / "nowhere.yaml"
    assert refusal(nowhere) == f"cannot read the recipe {str(nowhere)!r}: No such file or directory"
    assert refusal(str(tmp_path)).startswith(f"cannot read the recipe {str(tmp_path)!r}: ")


def test_messages_name_the_file(tmp_path):
    path = with_lines(tmp_path, "sed: 3")
    assert refusal(path) == f"{path}: unknown key 'sed'; did you mean seed?"


def test_overrides_replace_what_the_file_says(tmp_path):
    path = with_lines(tmp_path, "seed: 1\nlearning_rate: 1e-4")
    found = read_recipe(path, {"seed": 2, "block_size": 8, "text": {"other": {"path": "x.txt"}}})
    assert (found.seed, found.block_size, list(found.text)) == (2, 8, ["other"])
    assert found.arguments["learning_rate"] == 1e-4
    assert read_recipe(path).seed == 1
    data = dict(BASE)
    assert read_recipe(data, {"seed": 5}).seed == 5
    assert data == BASE  # what was passed is not changed
    assert refusal(path, overrides={"sed": 2}).endswith("did you mean seed?")
    assert refusal(path, overrides={"do_train": True}).endswith("it always trains")
    streamed = text(streaming=True)
    assert read_recipe(path, {**streamed, "max_steps": 3}).text["new"].streaming


MEASURED = {"evaluate": {"kept": {"path": "kept.txt"}}}


def test_defaults_reach_the_trainer_and_own_values_win():
    arguments = recipe(**MEASURED).training_arguments(progress=True)
    for key, value in {**OURS, **FIXED}.items():
        found = getattr(arguments, key)
        assert found == value or (key == "report_to" and found == [])
    own = {"eval_steps": 7, "eval_on_start": False, "logging_steps": 3, "save_steps": 11, "save_total_limit": 5}
    arguments = recipe(**MEASURED, **own, learning_rate=1e-3, seed=9).training_arguments(progress=True)
    assert {key: getattr(arguments, key) for key in own} == own
    assert (arguments.learning_rate, arguments.seed, arguments.output_dir) == (1e-3, 9, "out")


@pytest.mark.parametrize("level", ["info", "error"])
def test_progress_is_as_it_was_asked_for_whatever_the_log_says(level):
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(getattr(transformers.logging, level.upper()))
    try:
        assert not recipe().training_arguments(progress=True).disable_tqdm
        assert recipe().training_arguments(progress=False).disable_tqdm
        assert recipe(disable_tqdm=True).training_arguments(progress=True).disable_tqdm
    finally:
        transformers.logging.set_verbosity(before)


def test_what_the_model_asks_for_wins_over_the_recipe():
    found = recipe(fp16=False, learning_rate=1e-3).training_arguments(progress=True, learning_rate=2e-3, use_cpu=True)
    assert (found.learning_rate, found.use_cpu) == (2e-3, True)
    found = recipe().training_arguments(progress=True, include_num_input_tokens_seen="non_padding")
    assert found.include_num_input_tokens_seen == "non_padding"  # as it is with packing none


def test_nothing_is_measured_where_there_is_nothing_to_measure():
    arguments = recipe().training_arguments(progress=True)
    assert (str(arguments.eval_strategy.value), arguments.eval_on_start) == ("no", False)
    for changes in (MEASURED, text(held_out=0.1)):
        arguments = recipe(**changes).training_arguments(progress=True)
        assert (str(arguments.eval_strategy.value), arguments.eval_on_start) == ("steps", True)


def test_bars_are_drawn_only_where_they_are_wanted():
    assert recipe().training_arguments(progress=False).disable_tqdm
    assert recipe(disable_tqdm=False).training_arguments(progress=False).disable_tqdm
    assert recipe(disable_tqdm=True).training_arguments(progress=True).disable_tqdm


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lr_scheduler_type": "wavy"}, "wavy is not a valid SchedulerType, please select one of .*'cosine'"),
        ({"optim": "adamx"}, "adamx is not a valid OptimizerNames"),
        ({"eval_strategy": "sometimes"}, "sometimes is not a valid IntervalStrategy"),
        ({"save_strategy": "often"}, "often is not a valid SaveStrategy"),
        ({"hub_strategy": "maybe"}, "maybe is not a valid HubStrategy"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"logging_steps": 0}, "non-zero --logging_steps"),
        ({"accelerator_config": {"x": 1}}, "unexpected keyword argument 'x'"),
    ],
)  # fmt: skip
def test_what_the_trainer_refuses_is_said_in_one_line(changes, why):
    found = recipe(**MEASURED, **changes)
    with pytest.raises(InputError, match=f"^the Trainer refuses the recipe: .*{why}") as error:
        found.training_arguments(progress=False, use_cpu=True)
    assert "\n" not in str(error.value)


FREE = {
    "output_dir": "elsewhere",
    "disable_tqdm": True,
    "run_name": "second",
    "dataloader_num_workers": 2,
    "logging_steps": 3,
    "logging_first_step": True,
    "log_level": "error",
    "report_to": "tensorboard",
    "save_steps": 7,
    "save_total_limit": 1,
    "hub_model_id": "me/mine",
    "push_to_hub": False,
}
BOUND = {
    "learning_rate": 2e-4,
    "seed": 1,
    "max_steps": 9,
    "per_device_train_batch_size": 2,
    "weight_decay": 0.2,
    "bf16": True,
    "model": "zoo/transformer-8",
    "plan": {"rule": "deep:2"},
    "text": {"new": {"path": "new.txt", "weight": 2.0}},
    "evaluate": {"kept": {"path": "kept.txt"}},
    "block_size": 64,
    "packing": "none",
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("key", FREE)
def test_a_resumed_training_may_log_and_save_otherwise(key):
    assert recipe(**{key: FREE[key]}).binding() == recipe().binding()


@pytest.mark.parametrize("key", BOUND)
def test_a_resumed_training_may_not_learn_otherwise(key):
    assert recipe(**{key: BOUND[key]}).binding() != recipe().binding()


def test_more_steps_are_the_same_training_only_at_a_constant_rate():
    def same(**changes: Any) -> bool:
        first, second = (recipe(max_steps=steps, **changes).binding() for steps in (10, 20))
        return first == second

    assert same(lr_scheduler_type="constant")
    assert same(lr_scheduler_type="constant_with_warmup", warmup_steps=3)
    assert not same()  # linear, which ends at the last step
    assert not same(lr_scheduler_type="cosine")
    constant = recipe(lr_scheduler_type="constant", max_steps=10)
    assert constant.binding() != recipe(lr_scheduler_type="constant", max_steps=10, learning_rate=1e-3).binding()
    assert constant.arguments["max_steps"] == 10  # only what is compared leaves it out


@pytest.mark.parametrize("data", [BASE, WHOLE, BASE | {"plan": "plan.json", "retrace": {"every": 9}}])
def test_a_recipe_survives_its_file(tmp_path, data):
    found = read_recipe(data)
    assert read_recipe(recipe_data(found)) == found
    again = read_recipe(file(tmp_path, yaml.safe_dump(recipe_data(found), sort_keys=False, allow_unicode=True)))
    assert again == found
    assert again.binding() == found.binding()
    assert recipe_data(recipe(block_size=1024, **text(weight=1.0))) == BASE  # defaults are left out


def test_the_example_can_be_read():
    found = read_recipe(Path(str(files("tracer.training") / "example.yaml")))
    assert found.arguments["learning_rate"] == 1e-3
    assert found.plan == {"rule": "shallow:4", "embeddings": "train", "head": "train"}
    assert found.text["new"].held_out == 0.05
    assert found.retrace == Retrace(every=60, probes="zoo/held", limit=10)
    arguments = found.training_arguments(progress=False)
    assert (arguments.max_steps, arguments.eval_steps, arguments.save_steps) == (120, 30, 60)


# What is still wrong, each to be turned into an ordinary test when it is mended.


def test_merge_keys_of_yaml_work(tmp_path):
    path = with_lines(tmp_path, "evaluate:\n  a: &a {path: x.txt, limit: 3}\n  b:\n    <<: *a\n    path: y.txt")
    assert read_recipe(path).evaluate["b"] == TextSource(path="y.txt", limit=3)


def test_a_key_that_stands_twice_is_shown_where_it_does(tmp_path):
    assert "line 3" in refusal(file(tmp_path, "seed: 1\nmodel: m\nseed: 2\n"))


@pytest.mark.parametrize("names", [{1: "x.txt"}, {False: "x.txt"}, {"1": "x.txt", 1: "y.txt"}])
def test_names_of_texts_are_texts(names):
    try:
        found = recipe(text={name: {"path": path} for name, path in names.items()})
    except InputError:
        return
    assert [source.path for source in found.text.values()] == list(names.values())


@pytest.mark.parametrize("line", ["run_name: 2024-13-45", f"seed: {'9' * 5000}", "seed: " + "[" * 3000])
def test_every_fault_of_a_file_is_one_line(tmp_path, line):
    try:
        message = refusal(with_lines(tmp_path, line))
    except InputError as error:  # which is a ValueError, too
        raise AssertionError from error
    assert "is not YAML" in message


@pytest.mark.parametrize("folder", [None, ""])
def test_an_empty_output_dir_is_none(folder):
    assert "output_dir" in refusal(BASE | {"output_dir": folder})


def test_a_weight_is_finite():
    assert "weight inf" in refusal(BASE | text(weight=float("inf")))


def test_a_limit_of_probes_is_checked():
    assert "limit 0" in refusal(BASE | {"retrace": {"every": 5, "limit": 0}})


def test_a_token_of_the_hub_is_written_nowhere():
    try:
        found = recipe(hub_token="hf_secret")
    except InputError:
        return
    assert "hf_secret" not in str(recipe_data(found))


def test_a_cache_would_undo_isolation():
    try:
        found = recipe(packing="isolated", use_cache=True)
    except InputError:
        return
    assert not found.training_arguments(progress=False).use_cache


def test_a_revision_that_looks_like_a_number_survives(tmp_path):
    found = recipe(revision="12e4")
    written = file(tmp_path, yaml.dump(recipe_data(found), Dumper=Dumper, sort_keys=False, allow_unicode=True))
    assert read_recipe(written) == found


def test_a_warm_up_by_share_binds_the_number_of_steps():
    first, second = (
        recipe(max_steps=steps, lr_scheduler_type="constant_with_warmup", warmup_steps=0.1).binding()
        for steps in (10, 20)
    )
    assert first != second


@pytest.mark.parametrize(
    "changes",
    [
        {"per_device_train_batch_size": 0},
        {"gradient_accumulation_steps": 0},
        {"num_train_epochs": 0},
        {"max_steps": 0},
        {"learning_rate": -1.0},
    ],
)
def test_numbers_that_train_nothing_are_refused(changes):
    with pytest.raises(InputError):
        recipe(**changes).training_arguments(progress=False)
