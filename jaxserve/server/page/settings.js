// The settings of an answer: what stands in the form -> fields of a request.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

/** Fields of `/v1/chat/completions`; what is empty is left to the server. Throws where a field holds nonsense. */
export function readSettings(form) {
  const fields = {};
  for (const name of NUMBERS) setNumber(fields, name, form.querySelector(`#${name}`));
  setNumber(fields, "max_completion_tokens", form.querySelector("#max_tokens"));
  const stop = form.querySelector("#stop").value;
  if (stop !== "") fields.stop = [stop];
  if (form.querySelector("#probabilities").checked) {
    fields.logprobs = true;
    setNumber(fields, "top_logprobs", form.querySelector("#alternatives"));
  }
  return fields;
}

/** The system prompt as messages: one, or none. */
export function systemMessages(form) {
  const content = form.querySelector("#system").value.trim();
  return content === "" ? [] : [{ role: "system", content }];
}

function setNumber(fields, name, input) {
  if (!input.checkValidity()) {
    input.closest("details").open = true;
    input.focus();
    throw new RangeError(`${input.labels[0].textContent.trim()}: ${input.validationMessage}`);
  }
  if (input.value !== "") fields[name] = input.valueAsNumber;
}
