// A waveform that grows: bars from left to right, each twice as long in time whenever the width is used up.

import { LEVELS_PER_SECOND } from "./take.js";

const BAR_PX = 3;
const PITCH_PX = 5;
const FEWEST_LEVELS = 4; // a bar's, so that a short word isn't a wall
const QUIETEST = 0.03; // of full scale: what is quieter all along is drawn as quiet

export class Waveform {
  #canvas;
  #take = null;
  #position = 0;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** take: or null. position: seconds heard. */
  show(take, position) {
    this.#take = take;
    this.#position = position;
    this.draw();
  }

  draw() {
    const canvas = this.#canvas;
    const { width, height } = canvas.getBoundingClientRect();
    const density = devicePixelRatio;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    const context = canvas.getContext("2d");
    context.scale(density, density);
    const style = getComputedStyle(canvas);
    const [played, waiting] = ["--played", "--waiting"].map((name) => style.getPropertyValue(name));
    const bars = this.#bars(Math.floor((width + PITCH_PX - BAR_PX) / PITCH_PX));
    canvas.dataset.bars = bars.heights.length;
    const loudest = Math.max(QUIETEST, ...bars.heights);
    const numPlayed = this.#position / bars.seconds;
    if (bars.heights.length === 0) { // a line where it will be
      context.fillStyle = waiting;
      context.fillRect(0, height / 2 - 0.5, width, 1);
    }
    for (const [n, level] of bars.heights.entries()) {
      const length = Math.max(BAR_PX, (level / loudest) * height);
      context.fillStyle = n < numPlayed ? played : waiting;
      context.beginPath();
      context.roundRect(n * PITCH_PX, (height - length) / 2, BAR_PX, length, BAR_PX / 2);
      context.fill();
    }
    this.#describe();
  }

  #bars(most) {
    const levels = this.#take?.levels ?? [];
    let each = FEWEST_LEVELS;
    while (levels.length > each * most && most > 0) each *= 2;
    const heights = [];
    for (let first = 0; first < levels.length; first += each) {
      heights.push(levels.slice(first, first + each).reduce((a, b) => Math.max(a, b)));
    }
    return { heights, seconds: each / LEVELS_PER_SECOND };
  }

  #describe() {
    const seconds = this.#take?.seconds ?? 0;
    const words = seconds
      ? `${seconds.toFixed(1)} s of speech, ${Math.min(this.#position, seconds).toFixed(1)} s heard`
      : "nothing spoken yet";
    this.#canvas.setAttribute("aria-label", `Waveform: ${words}`);
  }
}
