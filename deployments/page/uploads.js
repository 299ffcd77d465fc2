// Uploaded voices: adding one from a clip and its words, and deleting it.

import { ask, askJson } from "./api.js";
import { clearAll, clearOnEdit, show, showAt } from "./errors.js";

const byId = (id) => document.getElementById(id);

/** settings: its voices are loaded anew after each change. */
export function setUpUploads(settings) {
  const inputs = Object.fromEntries(["clip", "text", "name", "consent"].map((name) => [name, byId(`upload-${name}`)]));
  const { clip, text, name, consent } = inputs;
  const byParam = { audio_sample: clip, file: clip, ref_audio: clip, ref_text: text, name };
  const [status, alert, button, deletion] = ["upload-status", "upload-alert", "upload-button", "delete-voice"].map(byId);
  clearOnEdit(Object.values(inputs));
  clip.addEventListener("change", () => {
    if (!name.value && clip.files.length) name.value = nameFrom(clip.files[0].name);
  });

  byId("upload-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    reset();
    // Neither gets as far as the server: it has no word for consent, and a form without a file sends an empty one.
    if (!clip.files.length) return showAt(clip, "Choose a file.");
    if (!consent.checked) return showAt(consent, "A voice may be added only with its owner's consent.");
    const form = new FormData();
    form.append("name", name.value);
    form.append("audio_sample", clip.files[0]);
    if (text.value.trim()) form.append("ref_text", text.value);
    await working(`Listening to ${clip.files[0].name}`, async () => {
      const voice = await askJson("v1/audio/voices", { method: "POST", body: form });
      await settings.loadVoices(voice.id);
      event.target.reset();
      status.textContent = `${voice.id} is ready, and chosen.`;
    });
  });

  deletion.addEventListener("click", async () => {
    const { id } = settings.voice;
    if (!confirm(`Delete the voice ${id}? Nobody can speak with it from then on.`)) return;
    reset();
    await working(`Deleting ${id}`, async () => {
      await ask(`v1/audio/voices/${encodeURIComponent(id)}`, { method: "DELETE" });
      await settings.loadVoices();
      settings.inputs.voice.focus(); // the button is gone, or another voice's
      status.textContent = `${id} is deleted.`;
    });
  });

  function reset() {
    clearAll(Object.values(inputs));
    alert.hidden = true;
  }

  async function working(words, work) {
    if (button.ariaDisabled === "true") return; // still at the last one
    status.textContent = `${words}…`;
    button.setAttribute("aria-disabled", "true");
    try {
      await work();
    } catch (error) {
      status.textContent = "";
      show(error, byParam, alert);
    } finally {
      button.removeAttribute("aria-disabled");
    }
  }
}

/** The button that deletes is there while an uploaded voice is chosen. */
export function offerDeletion(voice) {
  const deletion = byId("delete-voice");
  deletion.hidden = !voice || voice.built_in;
  deletion.textContent = voice ? `Delete ${voice.id}` : "";
}

/** What a server takes as a name: letters, digits, - and _. */
function nameFrom(file) {
  return file.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 64);
}
