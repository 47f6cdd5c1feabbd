"""What ends training before its end, or keeps it from being kept: nothing is lost."""

import json

import pytest
from browser.conftest import PATCHED, asker, user_task

WORKER = {"worker.mjs": PATCHED % (b"patch.mjs", b"computing.mjs")}
ALIASES = {"computing.mjs": "worker.mjs"}
# Time passes faster for the worker, so that it keeps snapshots soon.
HURRIED = b"""
const now = performance.now.bind(performance);
performance.now = () => 200 * now();
"""
# What happens to the device with a step's news. The first is opened to see whether one can be,
# the second computes.
AT_STEP = b"""
const open = GPUAdapter.prototype.requestDevice;
let devices = 0;
GPUAdapter.prototype.requestDevice = async function (...given) {
  const device = await open.apply(this, given);
  if (++devices === 2) {
    const post = self.postMessage.bind(self);
    self.postMessage = (message, ...more) => {
      if (message.news?.kind === 'step' && message.news.step === %d) { %b }
      post(message, ...more);
    };
  }
  return device;
};
"""
LOST = AT_STEP % (3, b"device.destroy();")
FULL = b"""
const write = FileSystemSyncAccessHandle.prototype.write;
let writes = 0;
FileSystemSyncAccessHandle.prototype.write = function (...given) {
  if (writes++ >= %d) throw new DOMException('', 'QuotaExceededError');
  return write.apply(this, given);
};
"""
ROWS = 100


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory):
    """By browser, the adapter of training that nothing interrupts."""
    made = {}

    def adapter(browser):
        if browser not in made:
            ask = asker(site, tmp_path_factory.mktemp(browser))
            made[browser], _ = ask(browser, "page.html", user_task(rows=ROWS))
        return made[browser]["weights"]

    return adapter


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_reload_goes_on_with_the_same_bits(browser, ask, whole):
    patched = WORKER | {"patch.mjs": HURRIED}
    found, _ = ask(browser, "page.html", user_task(rows=ROWS) | {"reload": 3}, patched, ALIASES)
    assert "is saved at step" in found["kept"]
    assert found["takenUp"].startswith("Saved: step ")
    assert int(found["first"]) > 1
    assert found["weights"] == whole(browser)


# In the middle, and before the first step.
@pytest.mark.parametrize(("browser", "step"), [("firefox", 2), ("firefox", 0), ("chromium", 2)])
def test_a_stop_goes_on_with_the_same_bits(browser, step, ask, whole):
    found, _ = ask(browser, "page.html", user_task(rows=ROWS) | {"stop": step})
    assert found["kept"].startswith("Stopped after step" if step else "Stopped after step 0 of")
    assert found["weights"] == whole(browser)


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_lost_device_is_told_and_training_goes_on(browser, kept, ask, whole):
    patched = WORKER | {"patch.mjs": LOST + (HURRIED if kept else b"")}
    task = user_task(rows=ROWS) | {"tolerates": "Training resumes"}
    found, _ = ask(browser, "page.html", task, patched, ALIASES)
    assert found["told"] and found["told"][0].startswith("The GPU was lost")
    assert found["told"][0].endswith("from step 0.") is not kept
    assert found["weights"] == whole(browser)


# A snapshot is the data, three vectors and what is said of them. None fits, or one and no second.
@pytest.mark.parametrize("fits", [0, 7])
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_full_disk_is_told_and_training_goes_on(browser, fits, ask, whole):
    patched = WORKER | {"patch.mjs": HURRIED + FULL % fits}
    task = user_task(rows=ROWS) | {"tolerates": "no space for a snapshot", "reload": 3 * (fits > 0)}
    found, _ = ask(browser, "page.html", task, patched, ALIASES)
    assert found["told"] and found["figures"].startswith("Done")
    assert not fits or "is saved at step 1 of" in found["kept"]
    assert found["weights"] == whole(browser)


def test_what_was_trained_is_there_after_a_reload(ask):
    found, _ = ask("firefox", "page.html", user_task() | {"returns": True})
    assert "is saved" in found["kept"]
    assert found["again"] == found["weights"]


def test_a_site_that_reads_rows_otherwise_starts_afresh(ask, site):
    manifest = json.loads((site / "site.json").read_text())
    manifest["text"]["rows"]["train_on"] = "all"
    served = {"stale": {"site.json": json.dumps(manifest).encode()}}
    found, _ = ask("firefox", "page.html", user_task() | {"only": "training"}, served=served)
    assert "from an earlier version of this site" in found["kept"] and found["keeps"]


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_what_is_kept_can_be_forgotten(browser, ask, whole):
    found, _ = ask(browser, "page.html", user_task(rows=ROWS) | {"forget": True})
    assert found["offered"] and found["weights"] == whole(browser)
    assert found["kept"] == "" and not found["keeps"]
    assert found["places"][-1] == "train"  # the button is gone, and the keyboard goes on


# What a module was when training began: all tokens were trained on, or rows came in another order.
OTHERWISE = {
    "examples.mjs": ("(trained[i] ? id", "(true ? id"),
    "batches.mjs": ("BigInt(seed), BigInt(epoch)", "BigInt(seed) + 1n, BigInt(epoch)"),
}


@pytest.mark.parametrize("module", OTHERWISE)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_page_that_trains_otherwise_does_not_go_on(browser, module, ask, site, whole):
    present = (site / module).read_text()
    earlier = present.replace(*OTHERWISE[module])
    assert earlier != present
    patched = WORKER | {"patch.mjs": HURRIED}
    task = user_task(rows=ROWS) | {"reload": 3, "tolerates": "earlier version of this page"}
    served = {"earlier": {module: earlier.encode()}}
    found, _ = ask(browser, "page.html", task, patched, ALIASES, served=served)
    assert found["told"] and found["takenUp"].startswith("Saved: step ")
    assert found["weights"] == whole(browser)  # of training that started over


def test_training_can_start_over(ask):
    found, _ = ask("firefox", "page.html", user_task() | {"starts_over": True})
    assert found["again"] == found["weights"]


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_of_two_tabs_the_first_keeps_its_training(browser, ask, whole):
    task = user_task(rows=ROWS) | {"another": True, "tolerates": "Another tab", "returns": True}
    found, _ = ask(browser, "page.html", task)
    assert found["told"] and found["told"][0].startswith("Another tab of this page saves")
    assert found["weights"] == whole(browser)
    assert "trained on others.jsonl" in found["kept"]
