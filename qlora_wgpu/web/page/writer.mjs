/** Text from the model, token by token: the prompt at once, then one by one with keys and values kept. */

import { encodeBatch } from './batches.mjs';
import { Told } from './device.mjs';
import { Program } from './program.mjs';

export class Writer {
  /** @param {import('./model.mjs').Model} model */
  constructor(model) {
    this.model = model;
    this.cut = false; // whether the last text ended before the model ended it
    this._programs = new Map();
  }

  async _plans() {
    this._text ??= await this.model.files.json(this.model.variant.text);
    return this._text;
  }

  /**
   * Yields one token id after another.
   *
   * @param {number[]} prompt
   * @param {{most: number, stop: Set<number>, temperature?: number, topP?: number, random?: () => number, stopped?: () => boolean}} how
   */
  async *write(prompt, { most, stop, temperature = 0, topP = 1, random = Math.random, stopped = () => false }) {
    const { capacity } = await this._plans();
    this.cut = false;
    if (!prompt.length) throw new Told('The prompt is empty.');
    if (prompt.length >= capacity) throw new Told(`The conversation has ${prompt.length.toLocaleString('en')} tokens, and this page supports ${capacity.toLocaleString('en')}: press Clear, or send a shorter message.`);
    let logits = await this._logits(prompt, 0);
    let length = prompt.length;
    for (let count = 0; count < most && length < capacity && !stopped(); count++) {
      const token = chosen(logits, temperature, topP, random);
      if (stop.has(token)) return;
      yield token;
      if (count + 1 < most && length + 1 < capacity) logits = await this._logits([token], length);
      length++;
    }
    this.cut = true;
  }

  async _logits(ids, past) {
    const { programs } = await this._plans();
    const lengths = Object.keys(programs).map(Number).sort((a, b) => a - b);
    const length = past ? 1 : lengths.find((n) => n > 1 && n >= ids.length);
    const { hidden, head, batch, logits } = await this._ready(length, programs[length]);
    const { memory, site } = this.model;
    const example = { ids, labels: ids.map(() => -100) };
    memory.write(batch.buffer, encodeBatch(batch, [[example]], { listed: [ids.length - 1], past }).bytes);
    await hidden.run();
    await head.run();
    const [buffer, , offset] = head.window(logits, memory);
    const found = new Float32Array(await memory.read(buffer, 4 * site.model.vocab_size, offset));
    this.model.check();
    return found;
  }

  async _ready(length, plans) {
    if (!this._programs.has(length)) {
      const { memory, pipelines } = this.model;
      this._programs.set(length, {
        hidden: await Program.ready(plans.hidden, memory, pipelines),
        head: await Program.ready(plans.head, memory, pipelines),
        batch: plans.batch,
        logits: plans.logits,
      });
    }
    return this._programs.get(length);
  }
}

/** The likeliest token, or one of the likeliest that together have probability topP. */
export function chosen(logits, temperature, topP, random) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (!Number.isFinite(logits[best])) throw new Told("The model's logits are not finite: the adapter is damaged, start over.");
  if (temperature === 0) return best;
  const weights = Array.from(logits, (logit) => Math.exp((logit - logits[best]) / temperature));
  const order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a]);
  const total = weights.reduce((a, b) => a + b, 0);
  let [kept, sum] = [0, 0];
  while (kept < order.length && sum < topP * total) sum += weights[order[kept++]];
  let at = random() * sum;
  for (const i of order.slice(0, kept)) {
    at -= weights[i];
    if (at <= 0) return i;
  }
  return order[0];
}
