// What a person reads: ages, sizes, a plot. No state, no network.

export function age(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function size(bytes) {
  if (bytes == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes < 10 && unit ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

export const share = (cpu) => (cpu == null ? "–" : `${Math.round(cpu * 100)} %`);

export function plot(svg, values) {
  const width = 100, height = 30;
  if (values.length === 1) values = [values[0], values[0]];
  const most = Math.max(1, ...values);
  const step = width / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(2)},${(height - 2 - (value / most) * (height - 4)).toFixed(2)}`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = points.length ? `M${points.join("L")}` : "";
  svg.replaceChildren(path("under", line && `${line}L${width},${height}L0,${height}Z`), path("", line));
}

function path(kind, d) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", "path");
  element.setAttribute("class", kind);
  element.setAttribute("d", d);
  return element;
}

export function element(name, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

export function uuid() {
  // Not crypto.randomUUID: that one is missing where the page comes by plain HTTP from another machine.
  const hex = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}
