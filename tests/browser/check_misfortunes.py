"""GPUs that go and come, have no memory left or compute nonsense; networks and caches that fail."""

import json

import pytest
from browser.check_interruptions import ALIASES, AT_STEP, HURRIED, LOST, ROWS, WORKER, whole
from browser.conftest import user_task

__all__ = ["whole"]

# The second device, on which the page computes, has no memory for its twentieth buffer. The third
# is there only if the second is not.
REFUSED = b"""
const open = GPUAdapter.prototype.requestDevice;
let [devices, scopes, gone] = [0, 0, false];
GPUAdapter.prototype.requestDevice = async function (...given) {
  if (++devices === 3 && !gone) throw new Error('its memory is taken');
  const device = await open.apply(this, given);
  if (devices === 2) {
    const pop = device.popErrorScope.bind(device);
    device.popErrorScope = async () => {
      const error = await pop();
      return error ?? (++scopes === 20 ? new GPUOutOfMemoryError('') : null);
    };
    const destroy = device.destroy.bind(device);
    device.destroy = () => {
      gone = true;
      destroy();
    };
  }
  return device;
};
"""
# After that, there is none for a while.
AWAY = b"""
const request = navigator.gpu.requestAdapter.bind(navigator.gpu);
let asked = 0;
navigator.gpu.requestAdapter = async (given) => ([3, 4].includes(++asked) ? null : request(given));
"""
# Each of the first five steps loses it, once.
OFTEN = b"""
const open = GPUAdapter.prototype.requestDevice;
const post = self.postMessage.bind(self);
let [device, last] = [null, 0];
GPUAdapter.prototype.requestDevice = async function (...given) {
  return (device = await open.apply(this, given));
};
self.postMessage = (message, ...more) => {
  if (message.news?.kind === 'kept' && message.news.step > last && last < 5) {
    last = message.news.step;
    device.destroy();
  }
  post(message, ...more);
};
"""
# A step finds no memory, which nobody had asked for by a scope.
STARVED = AT_STEP % (
    4,
    b"""
    const error = new GPUOutOfMemoryError('no more');
    device.dispatchEvent(new GPUUncapturedErrorEvent('uncapturederror', { error }));
    """,
)
BROWSERS = pytest.mark.parametrize("browser", ["firefox", "chromium"])


@BROWSERS
def test_a_model_that_did_not_fit_leaves_its_memory(browser, ask):
    task = user_task() | {"refused": True, "tolerates": "Not enough GPU memory", "only": "load"}
    found, _ = ask(browser, "page.html", task, WORKER | {"patch.mjs": REFUSED}, ALIASES)
    assert found["violations"] == []


@BROWSERS
def test_a_gpu_that_comes_back_late_is_waited_for(browser, ask, whole):
    task = user_task(rows=ROWS) | {"tolerates": "Training resumes"}
    found, _ = ask(browser, "page.html", task, WORKER | {"patch.mjs": LOST + AWAY}, ALIASES)
    assert found["told"] and found["weights"] == whole(browser)


def test_a_gpu_that_is_lost_often_does_not_end_what_goes_forward(ask, whole):
    """In Firefox alone, since SwiftShader would compile all shaders six times."""
    task = user_task(rows=ROWS) | {"tolerates": "Training resumes"}
    found, _ = ask("firefox", "page.html", task, WORKER | {"patch.mjs": OFTEN + HURRIED}, ALIASES)
    assert len(found["told"]) == 5 and found["weights"] == whole("firefox")


@BROWSERS
def test_training_that_is_cut_off_goes_on(browser, ask, whole):
    task = user_task(rows=ROWS) | {"cut": True, "tolerates": "ran out of memory (no more)"}
    patched = WORKER | {"patch.mjs": STARVED + HURRIED}
    found, _ = ask(browser, "page.html", task, patched, ALIASES)
    figures, button = found["kept"]
    assert figures.startswith("Training was interrupted") and button == "Resume"
    assert found["weights"] == whole(browser)


@BROWSERS
def test_losses_that_are_no_numbers_end_training(browser, ask, site):
    manifest = json.loads((site / "site.json").read_text())
    manifest["training"]["loraplus"] = 1e38  # a first step that no number survives
    over = {"site.json": json.dumps(manifest).encode()}
    task = user_task() | {"cut": "for good", "tolerates": "finite"}
    found, _ = ask(browser, "page.html", task, over)
    assert "no longer finite at step" in found["told"][0]


@BROWSERS
def test_what_a_browser_kept_of_an_earlier_site_is_fetched_again(browser, ask):
    served = {"stale": {"weights/000.bin": b"another model's"}}
    found, requested = ask(browser, "page.html", user_task() | {"only": "load"}, served=served)
    assert found["violations"] == []
    assert len([path for path in requested if path.endswith("weights/000.bin")]) == 2


@BROWSERS
def test_a_network_that_ends_is_told(browser, ask):
    with pytest.raises(AssertionError, match=r"weights/000\.bin .* come whole.* try again"):
        ask(browser, "page.html", user_task(), served={"cut": "weights/000.bin"})
