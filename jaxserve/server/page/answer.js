// One answer: asked for, streamed, counted.

import { call } from "./api.js";
import { events } from "./sse.js";
import { TokenText } from "./tokens.js";

/**
 * Asks for an answer and passes on its pieces as they come. Returns what is known at its end:
 * `{text, reason, tokens, first, seconds}`: the finish reason, output tokens (null if never told), seconds to the first
 * piece and to the end. Throws ApiError, AbortError, or Error with the server's words where a stream breaks off.
 */
export async function ask(request, signal, onPieces) {
  const started = performance.now();
  const seconds = () => (performance.now() - started) / 1000;
  const result = { text: "", reason: null, tokens: null, first: null, seconds: 0 };
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", { body, signal });
  const cut = new TokenText();
  let isWhole = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
    const [choice] = chunk.choices;
    if (!choice) continue;
    const text = choice.delta.content ?? "";
    result.text += text;
    if (text !== "" && result.first === null) result.first = seconds();
    result.reason = choice.finish_reason ?? result.reason;
    onPieces(cut.add(text, request.logprobs ? (choice.logprobs?.content ?? []) : null), result.text);
  }
  onPieces(cut.end(), result.text);
  if (!isWhole) throw new Error("The connection broke off.");
  result.seconds = seconds();
  return result;
}

/** A line for people about a finished answer. */
export function describe({ reason, tokens, first, seconds }) {
  const parts = [];
  if (tokens !== null) parts.push(`${tokens} tokens`);
  if (first !== null) parts.push(`first after ${first.toFixed(2)} s`);
  if (tokens > 1 && first !== null && seconds > first) {
    parts.push(`${((tokens - 1) / (seconds - first)).toFixed(1)} tokens/s`);
  }
  if (reason === "length") parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}
