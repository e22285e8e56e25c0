// The live output of one exec, as the gateway's events bring it.

import { sandboxPath } from "./api.js";

const SHOWN = 400_000; // characters: a page is for looking, the whole output can be downloaded

export function follow(place, sandbox, exec, ended) {
  const decoder = new TextDecoder();
  const events = new EventSource(sandboxPath(sandbox, `/execs/${encodeURIComponent(exec)}/events`));
  place.textContent = "";
  events.addEventListener("output", ({ data }) => {
    const bytes = Uint8Array.from(atob(JSON.parse(data).data), (character) => character.charCodeAt(0));
    const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 30;
    place.append(decoder.decode(bytes, { stream: true }));
    if (place.textContent.length > SHOWN) place.textContent = place.textContent.slice(-SHOWN / 2);
    if (atEnd) place.scrollTop = place.scrollHeight;
  });
  events.addEventListener("end", ({ data }) => {
    events.close();
    ended(JSON.parse(data));
  });
  return () => events.close();
}
