// Requests to the server, relative to the page, so that any route prefix works; its errors, with the field they name.

const KEY_PLACE = "qwen3tts.api_key";

/** What went wrong, in words for people. param: the request's field at fault, or null. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = recallKey();

function recallKey() {
  try {
    return sessionStorage.getItem(KEY_PLACE) ?? "";
  } catch {
    return ""; // a browser that keeps nothing: the key lives as long as the page
  }
}

/** Kept for this tab alone, and never put into an address or an example. */
export function useKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY_PLACE, value);
  } catch {
    // as above
  }
}

export function hasKey() {
  return key !== "";
}

export function addressOf(path) {
  return new URL(path, document.baseURI).href;
}

/** A response that is 200. Throws ApiError, or an AbortError where `signal` was used. */
export async function ask(path, { headers = {}, ...options } = {}) {
  const sent = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
  let response;
  try {
    response = await fetch(addressOf(path), { ...options, headers: sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached.");
  }
  if (!response.ok) throw await describe(response);
  return response;
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

async function describe(response) {
  let told;
  try {
    told = (await response.json()).error;
  } catch {
    told = null; // not this server's own words: a proxy's, say
  }
  const message = told?.message ?? `The server answered ${response.status} ${response.statusText}`.trim();
  const wait = response.headers.get("Retry-After");
  const words = wait ? `${message}; try again in ${wait} s` : message;
  return new ApiError(words, { status: response.status, param: told?.param ?? null });
}

/** JSON as `JSON.stringify` has it, and BigInts as the numbers they are: a seed has 64 bits, a number 53. */
export function toJson(fields, indent = "") {
  const [open, between, close] = indent ? [`\n${indent}`, `,\n${indent}`, "\n"] : ["", ", ", ""];
  const pairs = Object.entries(fields).map(([name, value]) => {
    const written = typeof value === "bigint" ? String(value) : JSON.stringify(value);
    return `${JSON.stringify(name)}: ${written}`;
  });
  return `{${open}${pairs.join(between)}${close}}`;
}
