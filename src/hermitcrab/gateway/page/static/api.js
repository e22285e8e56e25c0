// Calls to the gateway. The cookie says who asks; the header says that this page asks and no other site.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "x-hermitcrab-page": "1", ...(body === undefined ? {} : { "content-type": "application/json" }) },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const said = await answer.text();
  const value = said && answer.headers.get("content-type")?.includes("json") ? JSON.parse(said) : said;
  if (!answer.ok) throw new Refused(answer.status, value?.error ?? (said || `HTTP ${answer.status}`));
  return value;
}

export const sandboxPath = (id, rest = "") => `v1/sandboxes/${encodeURIComponent(id)}${rest}`;

export function socket(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  return new WebSocket(url);
}
