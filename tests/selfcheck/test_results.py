"""What checks of a driver come to, what is kept of it, and which are run, without a device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, plainer
from qlora_wgpu.selfcheck import results
from qlora_wgpu.selfcheck.cases import Case
from qlora_wgpu.selfcheck.coverage import Footprint, covering
from qlora_wgpu.selfcheck.results import Result

ONE, TWO, THREE = (("a.wgsl", text) for text in ("x = #", "y = #", "z = #"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def device_of(profile=GPU_PROFILE, *, is_cpu=False):
    return SimpleNamespace(
        profile=profile, is_cpu=is_cpu, name="card", notes=(),
        gpu=SimpleNamespace(info={"description": ""}),
    )  # fmt: skip


def case(check, function=lambda run, *given: None, *arguments, in_textures=False):
    return Case(check, function, arguments, in_textures)


@pytest.mark.parametrize(
    ("excess", "refusal", "good"),
    [(0.0, "", True), (1.0, "", True), (1.001, "", False), (0.0, "no", False)],
)
def test_what_is_within_the_tolerance_is_good(excess, refusal, good):
    assert Result("a", "own", "float32", 0.5, excess, refusal).good == good


# ---- what is kept --------------------------------------------------------------------------------


def test_what_is_sound_is_kept_by_cut():
    every = frozenset({ONE, TWO, THREE})
    assert results.unchecked("cut", every) == every
    results.keep_sound("cut", frozenset({ONE}))
    results.keep_sound("cut", frozenset({TWO}))
    assert results.unchecked("cut", every) == {THREE}
    assert results.unchecked("other", every) == every
    results.keep_wrong("kind")
    assert results.is_wrong("kind") and not results.is_wrong("other")
    assert results.unchecked("cut", every) == {THREE}
    results.keep_sound("cut", frozenset({THREE}))
    assert results.is_wrong("kind") and not results.unchecked("cut", every)


def test_the_latest_32_cuts_are_kept():
    for number in range(32):
        results.keep_sound(str(number), frozenset({ONE}))
    results.keep_sound("0", frozenset({ONE}))  # is used again
    results.keep_sound("new", frozenset({ONE}))
    kept = [cut for cut in map(str, range(32)) if not results.unchecked(cut, frozenset({ONE}))]
    assert kept == ["0", *map(str, range(2, 32))]
    assert not results.unchecked("new", frozenset({ONE}))


@pytest.mark.parametrize("text", ["[]", "{", '{"sound": []}', '{"sound": {"cut": 1}, "wrong": 3}',
                                  '{"sound": {"cut": [1, null]}}'])  # fmt: skip
def test_another_file_in_its_place_keeps_nothing(text):
    results.cache_file().parent.mkdir(parents=True, exist_ok=True)
    results.cache_file().write_text(text)
    assert results.unchecked("cut", frozenset({ONE})) == {ONE} and not results.is_wrong("sound")


# ---- which profiles and checks -------------------------------------------------------------------


def test_a_device_is_checked_with_all_kernels_that_it_can_run():
    textured = cpu_profile(8)
    assert results.variants(device_of(textured)) == {"own": textured, "buffers": CPU_PROFILE}
    plain = GPU_PROFILE
    found = results.variants(device_of(plain))
    assert list(found) == ["own", "registers", "workgroup memory"]
    for name, kind in (("registers", "register"), ("workgroup memory", "tiled")):
        assert found[name] == replace(plain, gemm_kind=kind, attention_kind=kind)
    software = results.variants(device_of(textured, is_cpu=True))
    assert list(software) == ["own", "buffers", "as on GPUs", "as on GPUs, registers"]
    assert software["as on GPUs"] == GPU_PROFILE
    assert software["as on GPUs, registers"].attention_kind == "register"


@pytest.fixture
def two_checks(monkeypatch):
    """Cases of two checks, and the results that are asked for."""
    cases = [case("a", print, 1), case("a", print, 2), case("b", print, 3)]
    asked = []

    def result(device, cases, variant, profile, dtype):
        asked.append((tuple(each.arguments[0] for each in cases), variant, dtype))
        return Result(cases[0].check, variant, dtype, 0.0, 0.0)

    monkeypatch.setattr(results, "cases_for", lambda profile: cases)
    monkeypatch.setattr(results, "checks", lambda: ("a", "b"))
    monkeypatch.setattr(results, "_result", result)
    return asked


def test_each_check_is_run_in_each_variant_and_type(two_checks):
    device = device_of(GPU_PROFILE)
    found = list(results.check_device(device))
    assert len(found) == len(two_checks) == results.num_checks(device) == 3 * 2 * 2
    assert two_checks[:2] == [((1, 2), "own", "float32"), ((3,), "own", "float32")]
    assert {each[1:] for each in two_checks} == {
        (variant, dtype) for variant in results.variants(device) for dtype in results.DTYPES
    }


def test_own_cases_are_run_one_by_one_first_ones_first(two_checks):
    device = device_of()
    assert len(list(results.check_own_cases(device))) == results.num_own_cases(device) == 6
    order = [each[0] for each in two_checks]
    assert order == [(1,), (1,), (3,), (3,), (2,), (2,)]
    assert [each[2] for each in two_checks[:2]] == list(results.DTYPES)


# ---- one result ----------------------------------------------------------------------------------


@pytest.fixture
def told_runs(monkeypatch):
    """Runs of checks, each with an error, its excess and a shader."""
    outcomes = iter(((0.5, 0.25, "x"), (0.125, 0.75, "y"), (0.25, 0.5, "x")))

    def runner(device, profile, dtype, *, in_textures):
        worst, excess, shader = next(outcomes)
        return SimpleNamespace(worst=worst, excess=excess, shaders={shader})

    monkeypatch.setattr(results, "Runner", runner)


def test_a_check_is_as_good_as_its_worst_case(told_runs):
    seen = []
    cases = [case("a", lambda run, *given: seen.append(given), n) for n in range(3)]
    found = results._result(device_of(), cases, "own", GPU_PROFILE, "float32")
    assert found == Result("a", "own", "float32", 0.5, 0.75, "", frozenset({"x", "y"}))
    assert seen == [(0,), (1,), (2,)]


def test_what_is_exact_has_no_error(monkeypatch):
    exact = SimpleNamespace(worst=0.0, excess=0.0, shaders=set())
    monkeypatch.setattr(results, "Runner", lambda *given, **how: exact)
    found = results._result(device_of(), [case("a")], "own", GPU_PROFILE, "float32")
    assert (found.error, found.excess, found.shaders) == (0.0, 0.0, frozenset())


def failing(error):
    def function(run, *given):
        raise error

    return function


def test_what_a_driver_refuses_is_a_result_unless_the_device_is_gone(told_runs):
    made = results._result(device_of(), [case("a", failing(ValueError("b\n error: c\nd")))], "own",
                           GPU_PROFILE, "float32")  # fmt: skip
    assert (made.refusal, made.error, made.excess) == ("error: c", float("inf"), float("inf"))
    assert not made.good
    for error in (OutOfMemoryError("no room"), DeviceLostError("gone")):
        with pytest.raises(type(error)):
            results._result(device_of(), [case("a", failing(error))], "own", GPU_PROFILE, "float32")


# ---- what a run needs ----------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch):
    """A run of two statements, and what its checks say; the probe's words are kept."""
    state = SimpleNamespace(needed=frozenset({ONE, TWO}), found=[], asked=[], crashed=set())

    def launches(device, graph, launches, new, progress):
        state.asked.append(new)
        return state.found

    class Probe:
        def __init__(self, *what):
            state.probe = what

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(results, "identity", lambda device: "card, driver 1")
    monkeypatch.setattr(results.Footprint, "of", lambda launches: Footprint(state.needed, {}))
    monkeypatch.setattr(results, "check_launches", launches)
    monkeypatch.setattr(results, "guarded_probe", Probe)
    monkeypatch.setattr(results, "has_crashed", lambda kind: kind in state.crashed)
    state.graph = SimpleNamespace(profile=GPU_PROFILE, dtype="float32")
    return state


GOOD, WRONG = Result("a", "own", "float32", 0.0, 0.5), Result("b", "own", "float32", 0.25, 2.0)


def test_only_what_is_new_is_checked_and_kept_if_all_is_good(checked):
    device = device_of()
    checked.found = [GOOD, WRONG, WRONG]
    with pytest.raises(
        DeviceError,
        match=r"card \(unknown driver\) gives wrong results: b failed: "
        r"its error is 2\.5e-01 \(2 of 3 checks failed\); update the driver",
    ):
        results.ensure_sound(device, device_of, checked.graph, [])  # fmt: skip
    checked.found = [GOOD, replace(GOOD, check="c", refusal="no such type")]
    assert "c failed: no such type (1 of 2" in results.problem_of(
        device, device_of, checked.graph, []
    )
    checked.found = [GOOD]
    assert results.problem_of(device, device_of, checked.graph, []) == ""
    assert results.problem_of(device, device_of, checked.graph, []) == ""
    assert checked.asked == [frozenset({ONE, TWO})] * 3
    results.ensure_sound(device, device_of, checked.graph, [])
    assert len(checked.asked) == 3
    checked.needed = frozenset({ONE, THREE})
    results.ensure_sound(device, device_of, checked.graph, [])
    assert checked.asked[3:] == [frozenset({THREE})]
    assert checked.probe[1] == "checking card"


def test_kernels_that_are_wrong_give_way_and_are_avoided_from_then_on(checked):
    device, first = device_of(), plainer(GPU_PROFILE)
    assert results.give_way(device) == first == device.profile
    again = device_of()
    results.avoid_what_is_wrong(again)
    assert again.profile == first and "gave wrong results before" in again.notes[0]
    assert again.notes == (
        "card gave wrong results before with this driver: using 'register' products and "
        "'register' attention instead of 'tiled' products and 'tiled' attention",
    )
    while (profile := results.give_way(device)) is not None:
        assert device.profile == profile
    last = device.profile
    assert plainer(last) is None and device.profile == last
    crashing = device_of(last)
    results.avoid_what_is_wrong(crashing)
    assert crashing.profile == last and not crashing.notes


def test_kernels_whose_checks_crashed_are_avoided(checked):
    device = device_of()
    checked.crashed = {
        "checks of 'tiled' products and 'tiled' attention card, driver 1"
    }  # and of no other kernels
    results.avoid_what_is_wrong(device)
    assert device.profile == plainer(GPU_PROFILE) and "crashed before" in device.notes[0]


def test_checks_tell_how_far_they_are(monkeypatch):
    cases = [case("a", print, 1), case("b", print, 2)]
    monkeypatch.setattr(results, "cases_of_launches", lambda *given: cases)
    monkeypatch.setattr(results, "_result", lambda device, cases, *given: (cases[0].check, *given))
    told, graph = [], SimpleNamespace(profile=GPU_PROFILE, dtype="float32")
    found = list(results.check_launches(None, graph, [], None, told.append))
    assert found == [("a", "own", GPU_PROFILE, "float32"), ("b", "own", GPU_PROFILE, "float32")]
    assert [text.partition("only)")[2] for text in told] == ["", " 1/2", " 2/2"]


@pytest.fixture
def traced(monkeypatch):
    """Cases with the statements that each executes, and how often each was traced."""
    made, seen = {}, []

    class Tracer:
        def __init__(self, device, profile, dtype, *, in_textures):
            self.launches = []

    def use(**statements):
        def function(run, name):
            seen.append(name)
            run.launches = statements[name]

        for name in statements:
            made[name] = case(name[0], function, name, in_textures=name.endswith("t"))
        monkeypatch.setattr(results, "cases_for", lambda profile: list(made.values()))
        return made, seen

    monkeypatch.setattr(results, "Tracer", Tracer)
    monkeypatch.setattr(
        results.Footprint, "of", lambda launches: Footprint(frozenset(launches), {})
    )
    return use


OTHER = ("b.wgsl", "w = #")


def test_checks_of_the_same_files_come_before_those_in_textures(traced):
    made, seen = traced(a1=[ONE], a2=[TWO], b1=[OTHER], b2=[THREE], at=[ONE, TWO])
    chosen = results.cases_of_launches(None, GPU_PROFILE, "float32", [ONE, TWO])
    assert chosen == [made["a1"], made["a2"]] and seen == ["a1", "a2", "b1"]
    chosen = results.cases_of_launches(None, GPU_PROFILE, "float32", [ONE, TWO], frozenset({TWO}))
    assert chosen == [made["a2"]]
    seen.clear()
    chosen = results.cases_of_launches(None, GPU_PROFILE, "float32", [THREE])
    assert chosen == [made["b2"]] and seen == ["a1", "a2", "b1", "at", "b2"]
    assert results.cases_of_launches(None, GPU_PROFILE, "float32", [], frozenset()) == []


def test_checks_in_textures_are_those_that_execute_more(traced):
    made, _ = traced(a1=[ONE], at=[ONE], bt=[TWO, ONE])
    textured = cpu_profile(8)
    assert results.cases_of(None, textured, "float32") == [made["a1"], made["bt"]]
    assert results.cases_of(None, CPU_PROFILE, "float32") == list(made.values())


# ---- which checks cover statements ---------------------------------------------------------------


def parts(**found):
    """Cases by name, each with its statements and the lengths of its shaders."""
    return {
        case(name): Footprint(frozenset(own), lengths) for name, (own, lengths) in found.items()
    }


def names_of(chosen):
    return [each.check for each in chosen]


@pytest.mark.parametrize(
    ("compiled", "chosen"), [((), ["cheap"]), (("large",), ["dear"]), (("small",), ["cheap"])]
)
def test_the_check_with_the_most_new_for_its_code_comes_first(compiled, chosen):
    """What the run compiles anyway costs nothing more."""
    traced = parts(dear=({ONE, TWO}, {"large": 9000}), cheap=({ONE}, {"small": 100}))
    found, missing = covering(frozenset({ONE}), traced, compiled)
    assert names_of(found) == chosen and not missing
    traced = parts(
        dear=({ONE, TWO}, {"large": 5000}), cheap=({ONE}, {"small": 100}),
        rest=({TWO}, {"rest": 100}),
    )  # fmt: skip
    found, missing = covering(frozenset({ONE, TWO}), traced, compiled)
    expected = ["cheap", "rest"] if chosen == ["cheap"] else ["dear"]
    assert names_of(found) == expected and not missing


def test_checks_that_others_made_needless_are_left_out():
    traced = parts(
        first=({ONE, TWO}, {}),
        second=({ONE, THREE}, {"more": 100}),
        third=({TWO, OTHER}, {"m": 50}),
    )
    found, missing = covering(frozenset({ONE, TWO, THREE, OTHER}), traced)
    assert names_of(found) == ["third", "second"] and not missing


def test_what_no_check_executes_stays_missing():
    found, missing = covering(frozenset({ONE, TWO}), parts(only=({ONE}, {})))
    assert names_of(found) == ["only"] and missing == {TWO}
    assert covering(frozenset(), parts(only=({ONE}, {}))) == ([], frozenset())
    assert covering(frozenset({TWO}), parts(only=({ONE}, {})))[0] == []
