// Plays PCM while it arrives, through Web Audio.
//
// Each part becomes a buffer that is scheduled to the sample behind the one before. No AudioWorklet: that needs a
// secure context, and a phone that opens http://192.168.… has none. The context runs at the stream's own rate, so
// that parts join without a seam; a resampler per buffer would click.

const LEAD_S = 0.03; // from scheduling to sounding
const AHEAD_S = 5; // is scheduled; what is beyond waits as plain numbers
const FIRST_REFILL_S = 0.5; // gathered after the sound ran dry, doubled each time up to the next
const LONGEST_REFILL_S = 4;

export class PcmPlayer {
  #context = null;

  /** Call it where the user acts, or browsers keep it silent. onEnd: everything was heard. */
  open(sampleRate, onEnd) {
    this.close();
    this.#context = new AudioContext({ sampleRate });
    this.#context.resume();
    this.#onEnd = onEnd;
    this.#waiting = [];
    this.#runs = [];
    this.#taken = this.#sounding = this.#refill = this.numGaps = 0;
    this.#isWhole = false;
  }

  #onEnd;
  #waiting; // Float32Arrays that aren't scheduled yet
  #runs; // stretches without a gap: {when, from, until}, the first in the context's time, both others in the audio's
  #taken; // seconds of audio scheduled so far
  #sounding; // buffers scheduled and not over
  #refill; // seconds that must wait before a dry player goes on
  #isWhole; // no more will come
  numGaps = 0;

  get isOpen() {
    return this.#context !== null;
  }

  /** samples: Float32Array in [-1, 1]. */
  append(samples) {
    if (!this.isOpen || samples.length === 0) return;
    this.#waiting.push(samples);
    this.#schedule();
  }

  /** Nothing more will come. */
  finish() {
    if (!this.isOpen) return;
    this.#isWhole = true;
    this.#schedule();
    this.#endIfHeard();
  }

  /** At once, whatever is still to be heard. */
  close() {
    this.#context?.close();
    this.#context = null;
  }

  /** Seconds of audio that were heard. */
  get position() {
    const run = this.#runs?.findLast(({ when }) => when <= this.#now);
    return run ? Math.min(run.from + this.#now - run.when, run.until) : 0;
  }

  get #now() {
    return this.#context?.currentTime ?? 0;
  }

  get #rate() {
    return this.#context.sampleRate;
  }

  #schedule() {
    let run = this.#runs.at(-1);
    let end = run ? run.when + run.until - run.from : -1;
    if (end < this.#now) {
      if (run && !this.#refill) {
        this.numGaps += 1;
        this.#refill = Math.min(FIRST_REFILL_S * 2 ** (this.numGaps - 1), LONGEST_REFILL_S);
      }
      const gathered = this.#waiting.reduce((sum, part) => sum + part.length, 0) / this.#rate;
      if (gathered === 0 || (gathered < this.#refill && !this.#isWhole)) return;
      this.#refill = 0;
      end = this.#now + LEAD_S;
      run = { when: end, from: this.#taken, until: this.#taken };
      this.#runs.push(run);
    }
    while (this.#waiting.length && end - this.#now < AHEAD_S) {
      const samples = this.#waiting.shift();
      this.#sound(samples, end);
      end += samples.length / this.#rate;
      this.#taken += samples.length / this.#rate;
      run.until = this.#taken;
    }
  }

  #sound(samples, when) {
    const context = this.#context;
    const buffer = context.createBuffer(1, samples.length, context.sampleRate);
    buffer.copyToChannel(samples, 0);
    const source = context.createBufferSource();
    source.buffer = buffer;
    source.connect(context.destination);
    source.onended = () => {
      if (context !== this.#context) return; // closed meanwhile
      this.#sounding -= 1;
      this.#schedule(); // not by a timer: those sleep in a tab that isn't looked at
      this.#endIfHeard();
    };
    this.#sounding += 1;
    source.start(when);
  }

  #endIfHeard() {
    if (!this.#isWhole || this.#sounding || this.#waiting.length) return;
    this.close();
    this.#onEnd();
  }
}
