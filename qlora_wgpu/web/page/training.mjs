/** The training loop: figures come a step behind the device, snapshots while it goes on. */

import { BatchPlan, dropoutKey } from './batches.mjs';
import { Told } from './device.mjs';
import { learningRate, stepRow } from './schedule.mjs';
import { number } from './words.mjs';

const MOST_STEPS = 1e9; // as of a run

export class Training {
  /**
   * @param {import('./model.mjs').Model} model
   * @param {{ids: number[], labels: number[]}[]} examples
   * @param {object} settings The site's training settings, or what the user changed of them.
   */
  constructor(model, examples, settings) {
    Object.assign(this, { model, examples, settings, step: 0, tokens: 0, stopped: false });
    this.plan = new BatchPlan(examples.map((e) => e.ids.length), settings, model.site.buckets.at(-1));
    this.total = this.plan.totalSteps;
    if (this.total > MOST_STEPS) throw new Told(`Training would take ${number(this.total)} steps, more than ${number(MOST_STEPS)}: set fewer epochs.`);
  }

  /** Begins with the adapter as the site has it, and no moments. */
  begin() {
    this.model.writeVector('parameters', this.model.initial);
    for (const name of ['gradient', 'first_moment', 'second_moment']) {
      for (const [number] of this.model.variant.adapter[name]) this.model.memory.clear(number);
    }
    this.model.zeroStats();
  }

  /** Resumes from a snapshot. */
  resume({ step, tokens, parameters, first_moment: first, second_moment: second }) {
    this.begin();
    Object.assign(this, { step, tokens });
    this.model.writeVector('parameters', parameters);
    this.model.writeVector('first_moment', first);
    this.model.writeVector('second_moment', second);
  }

  /** All that decides how training goes on. */
  async snapshot() {
    const found = { step: this.step, tokens: this.tokens };
    for (const name of ['parameters', 'first_moment', 'second_moment']) found[name] = await this.model.readVector(name);
    return found;
  }

  /** Asks it to stop after the step that is under way. */
  stop() {
    this.stopped = true;
  }

  /**
   * Does the steps that are left.
   *
   * @param {{onStep?: (figures: object) => void, after?: (step: number) => Promise<void>, last?: number}} hooks
   *   `after` is waited for behind every step, with nothing under way but the step itself.
   */
  async run({ onStep = () => {}, after = null, last = this.total } = {}) {
    let pending = null;
    const finish = async () => {
      if (!pending) return;
      const { step, figures, rate, tokens } = pending;
      pending = null;
      const [loss, labels, norm] = await figures;
      if (!Number.isFinite(loss) || !Number.isFinite(norm)) throw new Told(notFinite(step));
      onStep({ step, total: this.total, loss: loss / labels, labels, norm, rate, tokens });
    };
    while (this.step < Math.min(last, this.total) && !this.stopped) {
      const submitted = await this._submit(this.step);
      await finish();
      pending = submitted;
      if (after) {
        await finish();
        await after(this.step);
      }
    }
    await finish();
    this.model.check();
  }

  async _submit(step) {
    const { model, settings } = this;
    let block = 0;
    for (const chosen of this.plan.blocks(step)) {
      const rows = chosen.map((row) => row.map((i) => this.examples[i]));
      // Python counts steps of keys from 1.
      const key = settings.random ? dropoutKey(settings.seed, step + 1, block) : undefined;
      this.tokens += (await model.accumulate('train', rows, key)).tokens;
      block++;
    }
    const { figures } = await model.step(stepRow(settings, this.total, step));
    this.step = step + 1;
    return { step: this.step, figures, rate: learningRate(settings, this.total, step), tokens: this.tokens };
  }
}

function notFinite(step) {
  if (step > 1) return `The loss or its gradient is no longer finite at step ${step}: train again with a lower learning rate.`;
  return 'The loss or its gradient is not finite at step 1: the values in the model are too large.';
}
