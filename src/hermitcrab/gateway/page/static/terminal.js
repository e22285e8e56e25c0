// A terminal into a sandbox: bytes both ways over one websocket, its size as JSON.

import { sandboxPath, socket } from "./api.js";

export function openTerminal(place, note, sandbox) {
  if (!window.Terminal) {
    note.textContent = "xterm.js is not part of this installation: `make page` fetches it.";
    return { close() {}, fit() {} };
  }
  const screen = new window.Terminal({ cursorBlink: true, fontSize: 13, scrollback: 5000, theme: { background: "#101214" } });
  const fitting = new window.FitAddon.FitAddon();
  screen.loadAddon(fitting);
  screen.open(place);
  fitting.fit();
  const link = socket(sandboxPath(sandbox, `/terminal?rows=${screen.rows}&columns=${screen.cols}`));
  link.binaryType = "arraybuffer";
  link.onopen = () => { note.textContent = ""; screen.focus(); };
  link.onmessage = ({ data }) => {
    if (typeof data === "string") note.textContent = `The shell has ended with status ${JSON.parse(data).exit}.`;
    else screen.write(new Uint8Array(data));
  };
  link.onclose = ({ reason }) => { note.textContent ||= reason || "The terminal has ended."; };
  const send = (data) => { if (link.readyState === WebSocket.OPEN) link.send(data); };
  screen.onData((text) => send(new TextEncoder().encode(text)));
  screen.onBinary((text) => send(Uint8Array.from(text, (character) => character.charCodeAt(0))));
  screen.onResize(({ rows, cols }) => send(JSON.stringify({ resize: [rows, cols] })));
  const watcher = new ResizeObserver(() => { if (place.offsetParent) fitting.fit(); });
  watcher.observe(place);
  return {
    fit: () => fitting.fit(),
    close() {
      watcher.disconnect();
      link.onclose = null;
      link.close();
      screen.dispose();
    },
  };
}
