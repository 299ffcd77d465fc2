// What can be chosen, as the server offers it, and what is chosen, as the fields of a request.

import { askJson } from "./api.js";

const WORDS = {
  CustomVoice: { instructions: "Instructions", example: "Cheerful, a little out of breath." },
  VoiceDesign: { instructions: "Description of the voice", example: "A low, calm voice of an old sailor." },
};

const byId = (id) => document.getElementById(id);

export class Settings {
  #models = [];
  #voices = [];
  #shown = 0; // of the voices' questions, so that a late answer to an old one is dropped
  inputs = Object.fromEntries(
    ["input", "model", "voice", "instructions", "language", "response_format", "speed", "seed", "x_vector_only_mode"]
      .map((name) => [name, byId(name)]),
  );

  /** onChange: something else would be sent from now on. */
  constructor(onChange) {
    this.#onChange = onChange;
    for (const input of Object.values(this.inputs)) input.addEventListener("input", () => this.#changed());
  }

  #onChange;

  /** The API's field -> the page's. */
  get byParam() {
    const { voice } = this.inputs;
    return { ...this.inputs, speaker: voice, ref_audio: voice, ref_text: voice };
  }

  get model() {
    return this.#models.find(({ id }) => id === this.inputs.model.value);
  }

  get voice() {
    return this.#voices.find(({ id }) => id === this.inputs.voice.value);
  }

  /** Throws ApiError. */
  async load() {
    this.#models = (await askJson("v1/models")).data;
    fill(this.inputs.model, this.#models.map(({ id, task_type }) => option(id, `${id} (${task_type})`)));
    await this.loadVoices();
  }

  /** Of the chosen model. chosen: a voice, by default the one that was. Throws ApiError. */
  async loadVoices(chosen = this.inputs.voice.value) {
    const question = (this.#shown += 1);
    const model = this.model;
    const offered = await askJson(`v1/audio/voices?model=${encodeURIComponent(model.id)}`);
    if (question !== this.#shown) return;
    this.#voices = offered.data.filter((voice) => !voice.alias_of);
    this.#showVoices(offered.default, chosen);
    const { language } = this.inputs;
    const spoken = language.value;
    fill(language, offered.languages.map((name) => option(name, titled(name))));
    language.value = offered.languages.includes(spoken) ? spoken : offered.languages[0];
    this.#showWhatItTakes(model);
    this.#changed();
  }

  #showVoices(first, chosen) {
    const { voice } = this.inputs;
    const groups = [
      ["Built-in", this.#voices.filter(({ built_in }) => built_in)],
      ["Uploaded", this.#voices.filter(({ built_in }) => !built_in)],
    ];
    fill(voice, groups.filter(([, voices]) => voices.length).map(([label, voices]) => {
      const group = document.createElement("optgroup");
      group.label = label;
      group.append(...voices.map((each) => option(each.id, spelled(each))));
      return group;
    }));
    const names = this.#voices.map(({ id }) => id);
    if (names.length) voice.value = [chosen, first].find((name) => names.includes(name)) ?? names[0];
    else fill(voice, [option("", "none yet")]);
  }

  #showWhatItTakes({ task_type, takes_instructions }) {
    const clones = task_type === "Base";
    byId("voice-field").hidden = task_type === "VoiceDesign";
    byId("instructions-field").hidden = !takes_instructions;
    byId("x-vector-field").hidden = byId("upload").hidden = !clones;
    byId("voice-hint").hidden = !clones || this.#voices.length > 0;
    byId("voice-hint").textContent = "Add one below: this model speaks with the voice of a clip.";
    const words = WORDS[task_type];
    if (words) {
      byId("instructions-label").textContent = words.instructions;
      this.inputs.instructions.placeholder = words.example;
    }
  }

  /** The fields of a request, without what is the server's own default. */
  request() {
    const { input, model, voice, instructions, language, response_format, speed, seed } = this.inputs;
    const body = { input: input.value };
    if (this.#models.length > 1) body.model = model.value;
    // Not while another model's voices are still on their way.
    if (this.#sends(voice) && this.voice.models.includes(model.value)) body.voice = voice.value;
    if (this.#sends(instructions)) body.instructions = instructions.value;
    if (this.#sends(this.inputs.x_vector_only_mode)) body.x_vector_only_mode = true;
    if (language.value && language.value !== "Auto") body.language = language.value;
    if (Number(speed.value) !== 1) body.speed = Number(speed.value);
    if (seed.value.trim()) body.seed = asSeed(seed.value.trim());
    body.response_format = response_format.value;
    return body;
  }

  /** Only what is shown and filled in. */
  #sends(input) {
    const isSet = input.type === "checkbox" ? input.checked : input.value.trim() !== "";
    return isSet && !input.closest("[hidden]");
  }

  #changed() {
    const { input, speed } = this.inputs;
    const count = [...input.value].length;
    byId("input-count").textContent = `${count.toLocaleString()} ${count === 1 ? "character" : "characters"}`;
    const words = `${Number(speed.value)}×`;
    byId("speed-shown").textContent = words;
    speed.setAttribute("aria-valuetext", words);
    this.#onChange();
  }
}

/** What is no whole number goes as it is: the server says what it expects. */
function asSeed(text) {
  return /^-?\d+$/.test(text) ? BigInt(text) : text;
}

function option(value, label) {
  return new Option(label, value);
}

function fill(select, children) {
  const chosen = select.value;
  select.replaceChildren(...children);
  if ([...select.options].some(({ value }) => value === chosen)) select.value = chosen;
}

function spelled({ id, built_in, dialect }) {
  if (!built_in) return id;
  return dialect ? `${titled(id)} (${titled(dialect)})` : titled(id);
}

/** "ono_anna" -> "Ono Anna": the checkpoint writes its names in lower case. */
function titled(name) {
  return name.replaceAll("_", " ").replace(/(^|\s)\S/g, (letter) => letter.toUpperCase());
}
