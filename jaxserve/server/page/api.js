// Calls to the server that the page came from, and the API key they need.

const KEY_NAME = "jaxserve-api-key";

/** An answer that is no success: `status` 0 where there was none, `message` for people. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The key lives as long as the tab. */
export function keepKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY_NAME);
}

/**
 * The response to a GET, or to a POST of `body` as JSON.
 * Throws ApiError; AbortError when `signal` says so.
 */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY_NAME);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server can't be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
