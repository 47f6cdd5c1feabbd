/** How long launches take on a device: guessed at first, then measured by their shaders, as gpu/cost_model.py. */

const LIMIT = 0.1; // seconds of work that the driver gets at once
const MOST = 200; // launches of a submit, so that the device begins while they are encoded
const CAUTION = 0.1; // of the limit, while nothing was measured

export class Pace {
  constructor() {
    this.shaders = new Map(); // [measured, guessed] seconds of each
    this.all = [0, 0];
  }

  /** Seconds of a launch. */
  seconds({ shader, seconds }) {
    const [measured, guessed] = this.shaders.get(shader) ?? this.all;
    return guessed ? (seconds * measured) / guessed : seconds / CAUTION;
  }

  /** Where a submit ends that begins with a launch: it has one, and no more than the limit. */
  end(launches, begin) {
    let total = this.seconds(launches[begin]);
    let end = begin + 1;
    while (end < launches.length && end - begin < MOST && total + this.seconds(launches[end]) <= LIMIT) {
      total += this.seconds(launches[end++]);
    }
    return end;
  }

  /** The submits of some launches: first and end of each. */
  cut(launches) {
    const pieces = [];
    for (let begin = 0; begin < launches.length; begin = pieces.at(-1)[1]) pieces.push([begin, this.end(launches, begin)]);
    return pieces;
  }

  /** Notes what launches took together; each its share by what was known of it. What was before counts half. */
  learn(launches, seconds) {
    const shares = launches.map((launch) => this.seconds(launch));
    const whole = shares.reduce((a, b) => a + b, 0);
    const found = new Map([...new Set(launches.map(({ shader }) => shader))].map((shader) => [shader, [0, 0]]));
    const all = [0, 0];
    launches.forEach((launch, i) => {
      for (const each of [found.get(launch.shader), all]) {
        each[0] += (seconds * shares[i]) / whole;
        each[1] += launch.seconds;
      }
    });
    const joined = (before, now) => now.map((value, i) => value + (before?.[i] ?? 0) / 2);
    for (const [shader, own] of found) this.shaders.set(shader, joined(this.shaders.get(shader), own));
    this.all = joined(this.all, all);
  }
}
