/** A curve of losses that grows. */

const [WIDTH, HEIGHT, MOST] = [720, 198, 720];

export class Chart {
  /**
   * @param {SVGPolylineElement} line
   * @param {HTMLElement} figure
   * @param {{now: HTMLElement, top: HTMLElement, steps: HTMLElement}} labels
   */
  constructor(line, figure, labels) {
    Object.assign(this, { line, figure, labels });
    this.clear();
  }

  clear() {
    this.losses = [];
    this.line.setAttribute('points', '');
  }

  add(step, total, loss) {
    this.losses.push([step, loss]);
    const top = Math.max(...this.losses.map(([, each]) => each));
    const every = Math.ceil(this.losses.length / MOST);
    const points = this.losses.filter((_, i) => i % every === 0 || i === this.losses.length - 1);
    this.line.setAttribute('points', points.map(([at, each]) => `${((WIDTH * at) / total).toFixed(1)},${(1 + HEIGHT * (1 - each / top)).toFixed(1)}`).join(' '));
    this.labels.now.textContent = `now ${loss.toFixed(4)}`;
    this.labels.top.textContent = `0 to ${top.toFixed(2)}`;
    this.labels.steps.textContent = `${total} steps`;
  }
}
