// Server-sent events of a fetch response. (EventSource can't send a key, nor a body.)

/**
 * Yields the data of each event as text. Comments and other fields are skipped.
 * Throws AbortError, or Error where the connection is lost; browsers each have other words for that.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const data = dataOf(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (data !== null) yield data;
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {}); // also where the connection is gone already
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}
