/** A curve of losses that grows: each step's, and their running mean. */

const [WIDTH, HEIGHT, MOST] = [720, 198, 720];
const MEMORY = 0.9; // of the running mean

export class Chart {
  /**
   * @param {{raw: SVGPolylineElement, mean: SVGPolylineElement}} lines
   * @param {{now: HTMLElement, top: HTMLElement, middle: HTMLElement, steps: HTMLElement}} labels
   */
  constructor(lines, labels) {
    Object.assign(this, { lines, labels });
    this.clear();
  }

  clear() {
    this.points = [];
    this.top = 0;
    for (const line of Object.values(this.lines)) line.setAttribute('points', '');
    for (const label of Object.values(this.labels)) label.textContent = '';
  }

  add(step, total, loss) {
    // Steps that are done again, after a lost device, replace what was drawn.
    while (this.points.length && this.points.at(-1).step >= step) this.points.pop();
    const before = this.points.at(-1)?.weighted ?? { sum: 0, weight: 0 };
    const weighted = { sum: MEMORY * before.sum + loss, weight: MEMORY * before.weight + 1 };
    this.points.push({ step, loss, weighted, mean: weighted.sum / weighted.weight });
    this.top = Math.max(this.top, loss);
    const every = Math.ceil(this.points.length / MOST);
    const shown = this.points.filter((_, i) => i % every === 0 || i === this.points.length - 1);
    const drawn = (key) => shown.map((p) => `${((WIDTH * (p.step - 1)) / Math.max(1, total - 1)).toFixed(1)},${(1 + HEIGHT * (1 - p[key] / this.top)).toFixed(1)}`).join(' ');
    this.lines.raw.setAttribute('points', drawn('loss'));
    this.lines.mean.setAttribute('points', drawn('mean'));
    this.labels.now.textContent = `${loss.toFixed(4)} at step ${step.toLocaleString('en')}`;
    this.labels.top.textContent = this.top.toFixed(2);
    this.labels.middle.textContent = (this.top / 2).toFixed(2);
    this.labels.steps.textContent = `step ${total.toLocaleString('en')}`;
  }
}
