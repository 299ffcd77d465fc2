// The same request by program: curl and Python, to be copied. A key is named, never shown.

import { addressOf, hasKey, toJson } from "./api.js";

const SPEECH = "v1/audio/speech";
const KEY_VARIABLE = "QWEN3TTS_API_KEY";

/** body: the request's fields. */
export function curlFor(body) {
  const lines = [`curl -f ${quoted(addressOf(SPEECH))}`, "-H 'content-type: application/json'"];
  if (hasKey()) lines.push(`-H "authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${quoted(toJson(body))}`, `-o speech.${body.response_format}`);
  return lines.join(" \\\n     ");
}

export function pythonFor(body) {
  const imports = hasKey() ? "import os\n\nimport httpx\n" : "import httpx\n";
  const headers = hasKey() ? `, headers={"authorization": f"Bearer {os.environ['${KEY_VARIABLE}']}"}` : "";
  // JSON's strings and numbers are Python's too; true is not.
  const fields = Object.entries(body).map(([name, value]) => {
    const written = value === true ? "True" : toJson({ name: value }).slice('{"name": '.length, -1);
    return `    ${JSON.stringify(name)}: ${written},`;
  });
  return `${imports}
body = {
${fields.join("\n")}
}
url = ${JSON.stringify(addressOf(SPEECH))}
with (
    httpx.stream("POST", url, json=body, timeout=None${headers}) as response,
    open("speech.${body.response_format}", "wb") as file,
):
    response.raise_for_status()
    for part in response.iter_bytes():
        file.write(part)
`;
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
