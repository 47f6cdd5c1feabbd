"""Reward functions by name and of files: what they give, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from qlora_wgpu.errors import ConfigError, DataError, RewardError
from qlora_wgpu.grpo import rewards
from qlora_wgpu.grpo.reward_process import RewardProcess
from qlora_wgpu.grpo.rewards import built_in, rewards_of

CASES = [
    ("exact_match", {}, ["Paris ", "paris"], ["Paris", "Paris"], [1, 0]),
    ("contains", {}, ["It is Paris.", "Rome", "x"], ["Paris", "Paris", " "], [1, 0, None]),
    ("regex", {"pattern": r"\bno\b"}, ["oh no!", "nothing"], [0, 0], [1, 0]),
    ("numeric", {}, ["so 1,234.50 $", "12", "", "5%"], ["$1234.5", "13", "7", "none"],
     [1, 0, 0, None]),
    ("numeric", {"tolerance": 0.1}, ["105"], ["100"], [1]),
    ("format", {"tags": ["think", "answer"]},
     ["<think>a</think>\n<answer>b</answer>", "<think>a<answer>b</answer>",
      "x<think></think><answer></answer>"], [0, 0, 0], [1, 0, 0]),
    ("json", {}, ['{"a": 1}', "```json\n[1]\n```", "a", "[" * 100_000], [0] * 4, [1, 1, 0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "completions", "answers", "expected"), CASES)
def test_what_a_name_gives(name, options, completions, answers, expected):
    for given in (completions, [[{"role": "assistant", "content": c}] for c in completions]):
        made = built_in(name, options)(completions=given, completion_ids=[], answer=answers)
        assert list(made) == expected


def test_length_counts_tokens():
    made = built_in("length", {"target": 4})(completion_ids=[[1] * n for n in (4, 2, 0, 8, 99)])
    assert made == [1.0, 0.5, 0.0, 0.0, 0.0]


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
AGES = ['{"age": 3}', '```json\n{"age": 4}\n```', '{"age": "3"}', "{}", "age", "[" * 100_000]


def test_json_conforms_to_a_schema():
    pytest.importorskip("jsonschema")  # an extra
    made = built_in("json_schema", {"schema": AGE})(completions=AGES)
    assert made == [1, 1, 0, 0, 0, 0]
    rows = [AGE, json.dumps(AGE), {"type": "object"}, {"type": "array"}, None, AGE]
    by_row = built_in("json_schema", {"column": "form"})
    assert by_row(completions=AGES, form=rows) == [1, 1, 1, 0, None, 0]
    with pytest.raises(ConfigError, match=r"json_schema has an invalid schema .*'x' is not valid"):
        built_in("json_schema", {"schema": {"type": "x"}})
    with pytest.raises(RewardError, match="column 'form' has an invalid"):
        by_row(completions=["1"], form=["{"])


def test_a_schema_reads_no_other_documents(monkeypatch):
    pytest.importorskip("jsonschema")  # an extra
    opened = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *given, **_: opened.append(given))
    function = built_in("json_schema", {"schema": {"$ref": "https://example.invalid/a.json"}})
    with pytest.raises(RewardError, match=r"json_schema failed: .*Unresolvable"):
        rewards_of({"json_schema": function}, {"completions": ["1"]})
    assert not opened


@pytest.mark.slow
def test_formulas_are_compared():
    pytest.importorskip("math_verify")  # an extra
    completions = [r"so \boxed{\frac{2}{6}}", r"$\frac{1}{2}$", "1/3", r"\frac{1}{3}", r"\boxed{7}"]
    answers = [*[r"\frac{1}{3}"] * 4, "none"]
    reward = built_in("math_verify", {"column": "solution"})
    expected = [1, 0, 0, 0, None]
    assert reward(completions=completions, solution=answers) == expected
    with ThreadPoolExecutor(1) as other:
        assert other.submit(reward, completions=completions, solution=answers).result() == expected


@pytest.mark.parametrize(
    ("name", "package"), [("json_schema", "jsonschema"), ("math_verify", "math-verify")]
)
def test_packages_of_rewards_that_are_missing(monkeypatch, name, package):
    monkeypatch.setattr("qlora_wgpu.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"^{package} is required for the reward {name}: pip"):
        built_in(name, {})


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("exact", {}, "unknown function 'exact' .known: exact_match"),
        ("regex", {}, "regex needs pattern"),
        ("regex", {"pattern": "("}, "invalid pattern"),
        ("regex", {"pattern": 3}, "regex has an invalid option: "),
        ("numeric", {"tol": 1}, "no option 'tol' .known: column, tolerance"),
        ("length", {"target": 0}, "target of 1 token or more"),
        ("format", {"tags": "think"}, "a list of tags"),
    ],
)
def test_what_is_no_function(name, options, match):
    with pytest.raises(ConfigError, match=match):
        built_in(name, options)


BATCH = {"prompts": ["p", "q"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]]}


def test_rewards_are_a_table():
    made = rewards_of({"a": lambda **b: [1, None], "b": lambda **b: [0.5, True]}, BATCH)
    assert made[0].tolist() == [1.0, 0.5] and made[1, 0] != made[1, 0] and made[1, 1] == 1.0


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda **b: [1.0], "returned 1 rewards for 2 completions"),
        (lambda **b: [1.0, float("nan")], "returned nan, not a finite number .* completion 'bb'"),
        (lambda **b: ["1", 0], "returned '1'"),
        (lambda **b: 1 / 0, "reward function f failed: ZeroDivisionError"),
        (built_in("exact_match", {"column": "x"}), "no column 'x'"),
    ],
)
def test_a_reward_that_is_none_is_an_error_that_names_it(function, match):
    with pytest.raises(DataError, match=match):
        rewards_of({"f": function}, BATCH)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "own.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(("seconds", "tried"), [(30.0, 3), (-1.0, 1)])
def test_completions_are_tried_one_by_one_for_some_time(monkeypatch, seconds, tried):
    monkeypatch.setattr(rewards, "_MOST_SECONDS", seconds)
    monkeypatch.setattr(rewards, "_MOST_TRIED", 3)
    sizes = []

    def fails_on_many(completions, **_):
        sizes.append(len(completions))
        return [1.0] if len(completions) == 1 else 1 / 0

    batch = {"completions": list("abcde"), "prompts": list("ppppp")}
    with pytest.raises(RewardError, match=r"^reward function f failed: ZeroDivisionError: [^(]*$"):
        rewards_of({"f": fails_on_many}, batch)
    assert sizes == [5] + [1] * tried


def test_the_completion_that_a_function_fails_on_is_named():
    def fails(completions, **_):
        return [1 / (text != "b") for text in completions]

    batch = {"completions": ["a", "b", "b"], "prompts": list("ppp")}
    with pytest.raises(RewardError, match=r"ZeroDivisionError.* \(on the completion 'b'\)$"):
        rewards_of({"f": fails}, batch)


def test_more_rewards_than_completions_are_not_all_drawn():
    with pytest.raises(RewardError, match="f returned more than 2 rewards for 2 completions"):
        rewards_of({"f": lambda **_: iter(int, 1)}, {"completions": ["a", "b"]})
    with pytest.raises(RewardError, match="f returned 1 rewards for 2 completions"):
        rewards_of({"f": lambda **_: [1]}, {"completions": ["a", "b"]})


def test_a_file_s_function_runs_in_a_process(written, capfd):
    text = "def score(completions, scale, **rest):\n    print('hello')\n"
    text += "    return [None if c == 'a' else len(c) * s for c, s in zip(completions, scale)]\n"
    reward = RewardProcess(written(text), "score")
    try:
        assert reward(**BATCH, scale=[1.0, 2.0]) == [None, 4.0]
        with pytest.raises(DataError, match=r"KeyError|TypeError"):
            reward(**BATCH)
        assert reward(**BATCH, scale=[1.0, 1.0]) == [None, 2.0]
    finally:
        reward.close()
    out, err = capfd.readouterr()
    assert not out and "hello" in err


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x = 1", "it has no function score"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(4)", "ended with exit code 4"),
    ],
)
def test_a_file_that_is_none(written, text, match):
    with pytest.raises(ConfigError, match=match):
        RewardProcess(written(text), "score")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("import time; time.sleep(60)", r"own.py:score: no rewards within 0.5 s$"),
        (
            "'bb' in batch['completions'] and os._exit(9); return [1]",
            r"code 9 \(on the completion 'bb",
        ),
        ("os.kill(os.getpid(), 9)", r"ended with SIGKILL \(on the completion 'a"),
        ("raise SystemExit(3)", r"own.py:score: SystemExit: 3 \(on the completion"),
        ("return ['x', 1]", "own.py:score returned 'x', not a finite number or None"),
        ("return [10**400] * 2", "returned inf, not a finite number"),
        ("return itertools.count()", "returned more than 2 rewards for 2 com"),
        ("os.closerange(3, 64)", "ended with exit code 1"),
        ("os.write(4, b'{}\\n'); return [1.0, 2.0]", "it has written to the pipe"),
        ("os.fork(); return [1.0, 'x']", "returned 'x'"),
    ],
)
def test_a_function_that_ends_a_batch(written, body, match):
    text = f"import itertools, os\ndef score(**batch):\n    {body}\n"
    reward = RewardProcess(written(text), "score", timeout=0.5)
    try:
        with pytest.raises(DataError, match=match):
            rewards_of({"score": reward}, BATCH)
    finally:
        reward.close()
    assert not reward.is_running


def test_a_file_that_does_not_exist():
    with pytest.raises(ConfigError, match="does not exist"):
        RewardProcess("nowhere.py", "score")
