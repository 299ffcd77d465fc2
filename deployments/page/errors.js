// Errors where they belong: beside the field they name, else in an alert. Every field has a `…-error` below it.

/** Show the message at a field, open what hides it, and go there. */
export function showAt(input, message) {
  const error = errorOf(input);
  error.textContent = message;
  error.hidden = false;
  input.setAttribute("aria-invalid", "true");
  const hiding = input.closest("details");
  if (hiding) hiding.open = true;
  input.focus();
}

export function clear(input) {
  const error = errorOf(input);
  error.hidden = true;
  error.textContent = "";
  input.removeAttribute("aria-invalid");
}

export function clearAll(inputs) {
  for (const input of inputs) clear(input);
}

/** A message is gone once its field is touched. */
export function clearOnEdit(inputs) {
  for (const input of inputs) input.addEventListener("input", () => clear(input));
}

/** byParam: the API's field -> the page's. What no field here stands for goes to the alert. */
export function show(error, byParam, alert) {
  const input = byParam[error.param];
  if (input && !input.closest("[hidden]")) {
    showAt(input, error.message);
  } else {
    alert.textContent = error.message;
    alert.hidden = false;
  }
}

function errorOf(input) {
  return document.getElementById(`${input.id}-error`);
}
