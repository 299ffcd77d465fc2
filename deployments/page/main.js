// The page: one text, spoken, and heard while it is being made.
//
//   settings.js  what is chosen ──> here ──> api.js ──> the server
//                                    │<── PCM as it is made
//                                    └──> take.js (kept) ──> waveform.js (seen)
//                                     └─> pcm_player.js (heard)

import { ApiError, ask, hasKey, toJson, useKey } from "./api.js";
import { clear, clearAll, clearOnEdit, show, showAt } from "./errors.js";
import { PcmPlayer } from "./pcm_player.js";
import { Settings } from "./settings.js";
import { curlFor, pythonFor } from "./snippets.js";
import { Take } from "./take.js";
import { offerDeletion, setUpUploads } from "./uploads.js";
import { Waveform } from "./waveform.js";

const SPEECH = "v1/audio/speech";
const FROM_WHAT_WAS_HEARD = ["wav", "pcm"]; // other formats are the server's work, made again with the same seed

const byId = (id) => document.getElementById(id);
const [status, alert, speakButton, replayButton, downloadButton, keepSeedButton, keyForm, keyInput] = [
  "status", "alert", "speak", "replay", "download", "keep-seed", "key-form", "api-key",
].map(byId);

const player = new PcmPlayer();
const waveform = new Waveform(byId("waveform"));
const settings = new Settings(showChoices);
let take = null;
let fetching = null; // AbortController of the request whose audio arrives

// ------------------------------------------------------------ speaking
async function speak() {
  stop();
  reset();
  const request = settings.request();
  if (!settings.model) return showProblem(new ApiError("The server's models aren't known yet."));
  const mine = (take = new Take(request));
  const controller = (fetching = new AbortController());
  for (const id of ["ttfa", "rtf", "length", "take-seed"]) byId(id).textContent = "–";
  say("Waiting for the first sound…");
  showState();
  requestAnimationFrame(showProgress);
  try {
    player.open(settings.model.sample_rate_hz, showState);
    await receive(mine, controller.signal);
    if (fetching === controller) say(spokenWords(mine));
  } catch (error) {
    if (fetching !== controller) return; // stopped, and said so
    say("");
    showProblem(error);
  } finally {
    if (fetching === controller) {
      fetching = null;
      player.finish(); // what came is heard to its end, whatever became of the rest
      showState();
    }
  }
}

/** Throws ApiError, for a refusal and for a stream that breaks off. */
async function receive(mine, signal) {
  const body = { ...mine.request, response_format: "pcm", stream: true };
  const sentAt = performance.now();
  const seconds = () => (performance.now() - sentAt) / 1000;
  const response = await post(body, signal);
  mine.begin(Number(response.headers.get("X-Sample-Rate-Hz")), response.headers.get("X-Seed"));
  const reader = response.body.getReader();
  for (let isFirst = true; ; isFirst = false) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      throw new ApiError(`The server broke off after ${mine.seconds.toFixed(1)} s of speech; what came is kept.`);
    });
    if (done) break;
    if (signal.aborted) return;
    if (isFirst) {
      byId("ttfa").textContent = `${Math.round(seconds() * 1000)} ms`;
      byId("take-seed").textContent = byId("take-seed").title = mine.seed;
      say("Speaking…");
    }
    player.append(mine.append(value));
    byId("rtf").textContent = shortNumber(seconds() / mine.seconds);
  }
  mine.isWhole = true;
}

function post(body, signal) {
  return ask(SPEECH, { method: "POST", headers: { "content-type": "application/json" }, body: toJson(body), signal });
}

/** The request, which frees its place on the server, and the sound. */
function stop() {
  const wasActive = isActive();
  const heard = player.isOpen ? player.position : 0;
  const controller = fetching;
  fetching = null;
  controller?.abort();
  player.close();
  if (wasActive) {
    say(`Stopped after ${heard.toFixed(1)} s.`);
    showState();
  }
}

function replay() {
  reset();
  player.open(take.sampleRate, showState);
  for (const part of take.samples()) player.append(part);
  player.finish();
  showState();
  requestAnimationFrame(showProgress);
}

function isActive() {
  return fetching !== null || player.isOpen;
}

// ------------------------------------------------------------ the file
async function download() {
  reset();
  const format = downloadFormat();
  const name = `speech-${take.seed}.${format}`;
  if (format === "wav") return save(take.wav(), name);
  if (format === "pcm") return save(take.pcm(), name);
  say(`Making the ${labelOf(format)}…`);
  try {
    const body = { ...take.request, seed: BigInt(take.seed), response_format: format };
    save(await (await post(body)).blob(), name);
    say(`${name} is made.`);
  } catch (error) {
    say("");
    showProblem(error);
  }
}

/** A take that was stopped or cut is only here. */
function downloadFormat() {
  const format = settings.inputs.response_format.value;
  return take && !take.isWhole && !FROM_WHAT_WAS_HEARD.includes(format) ? "wav" : format;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function labelOf(format) {
  return [...settings.inputs.response_format.options].find(({ value }) => value === format).text;
}

// ------------------------------------------------------------ what is shown
function say(words) {
  status.textContent = words;
}

function reset() {
  alert.hidden = true;
  clearAll(Object.values(settings.inputs));
}

function showProblem(error) {
  if (error.status === 401) return askForKey(error);
  show(error instanceof ApiError ? error : new ApiError(String(error)), settings.byParam, alert);
}

function showState() {
  const active = isActive();
  speakButton.classList.toggle("is-active", active);
  byId("speak-label").textContent = active ? "Stop" : "Speak";
  replayButton.disabled = active || !take?.numSamples;
  downloadButton.disabled = fetching !== null || !take?.numSamples;
  downloadButton.textContent = `Download ${labelOf(downloadFormat())}`;
  keepSeedButton.hidden = !take?.seed;
  waveform.show(take, shownPosition());
}

function showProgress() {
  if (!isActive()) return;
  if (take.numSamples) byId("length").textContent = `${take.seconds.toFixed(1)} s`;
  waveform.show(take, shownPosition());
  requestAnimationFrame(showProgress);
}

/** Once heard, all of it is. */
function shownPosition() {
  if (player.isOpen) return player.position;
  return take ? take.seconds : 0;
}

function spokenWords(mine) {
  const gaps = player.numGaps;
  const dry = gaps ? `, and the sound ran dry ${gaps === 1 ? "once" : `${gaps} times`}` : "";
  return `${mine.seconds.toFixed(1)} s of speech${dry}.`;
}

function shortNumber(value) {
  return value < 0.1 ? value.toFixed(3) : value.toFixed(2);
}

function showChoices() {
  const body = settings.request();
  if (body.response_format === "pcm") body.stream = true;
  const language = document.querySelector("[name=snippet]:checked").value;
  byId("snippet").firstElementChild.textContent = language === "curl" ? curlFor(body) : pythonFor(body);
  byId("copied").textContent = "";
  offerDeletion(settings.voice);
  showState();
}

async function copy() {
  const code = byId("snippet").firstElementChild;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // Not a secure context (http from another machine), or not allowed: the old way asks for neither.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  byId("copied").textContent = "Copied.";
}

// ------------------------------------------------------------ keys
function askForKey(error) {
  keyForm.hidden = false;
  byId("more").hidden = true; // what it leads to asks for a key, and a link brings none
  keyInput.value = "";
  if (hasKey()) showAt(keyInput, error.message);
  else keyInput.focus(); // nothing is wrong yet
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  clear(keyInput);
  useKey(keyInput.value.trim());
  start();
});

async function start() {
  byId("more").hidden = hasKey();
  say("Asking the server what it offers…");
  alert.hidden = true;
  try {
    await settings.load();
    say("");
    if (!keyForm.hidden) {
      keyForm.hidden = true;
      settings.inputs.input.focus();
    }
  } catch (error) {
    say("");
    showProblem(error);
  }
}

// ------------------------------------------------------------ hands
byId("speech").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isActive()) stop();
  else speak();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isActive()) stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!event.repeat) speak();
  }
});
replayButton.addEventListener("click", replay);
downloadButton.addEventListener("click", download);
keepSeedButton.addEventListener("click", () => {
  settings.inputs.seed.value = take.seed;
  settings.inputs.seed.dispatchEvent(new Event("input"));
});
settings.inputs.model.addEventListener("change", () => settings.loadVoices().catch(showProblem));
for (const choice of document.querySelectorAll("[name=snippet]")) choice.addEventListener("change", showChoices);
byId("copy").addEventListener("click", copy);
clearOnEdit(Object.values(settings.inputs));
setUpUploads(settings);
start();
