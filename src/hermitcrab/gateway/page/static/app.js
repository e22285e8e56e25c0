import { call, sandboxPath } from "./api.js";
import { follow } from "./output.js";
import { openTerminal } from "./terminal.js";
import { age, element, plot, share, size, uuid } from "./text.js";

const EVERY = 2000;
const at = (id) => document.getElementById(id);

let chosen = "";           // the sandbox that is shown
let shownExec = "";
let terminal = null;
let stopFollowing = () => {};
let timer = 0;

// Logging in and out

async function begin() {
  try {
    await refresh();
    show(true);
  } catch (error) {
    if (error.status !== 401) say(error.message);
    show(false);
  }
}

function show(inside) {
  at("desk").hidden = !inside;
  at("login").hidden = inside;
  clearTimeout(timer);
  if (inside) timer = setTimeout(tick, EVERY);
  else choose("");
}

at("login").onsubmit = async (event) => {
  event.preventDefault();
  at("login-error").textContent = "";
  try {
    await call("POST", "page/login", { token: at("token").value });
    at("token").value = "";
    await begin();
  } catch (error) {
    at("login-error").textContent = error.message;
  }
};

at("logout").onclick = async () => {
  await call("POST", "page/logout");
  show(false);
};

// Looking

async function tick() {
  try {
    await refresh();
    at("connection").textContent = "";
  } catch (error) {
    if (error.status === 401) return show(false);
    at("connection").textContent = "no answer from the gateway";
  }
  timer = setTimeout(tick, EVERY);
}

async function refresh() {
  const overview = await call("GET", "page/overview");
  at("where").textContent = `${overview.engine} · version ${overview.version}`;
  at("tenant").textContent = overview.tenant;
  for (const name of ["sandboxes", "execs", "queue", "pool"]) {
    at(`figure-${name}`).textContent = overview.now[name];
    plot(at(`plot-${name}`), overview.history[name]);
  }
  showSandboxes(overview.sandboxes);
  if (chosen) await refreshDetail(overview.sandboxes.find(({ id }) => id === chosen));
}

function showSandboxes(sandboxes) {
  at("none").hidden = sandboxes.length > 0;
  at("sandboxes").replaceChildren(...sandboxes.map((sandbox) => {
    const row = element("tr", { tabindex: 0, "aria-selected": sandbox.id === chosen, "data-sandbox": sandbox.id },
      element("td", { text: sandbox.id }),
      element("td", {}, element("span", { text: sandbox.state, class: `badge ${sandbox.state}` })),
      element("td", { text: sandbox.tenant }),
      element("td", { text: age(sandbox.age) }),
      element("td", { text: share(sandbox.cpu) }),
      element("td", { text: size(sandbox.memory) }));
    if (sandbox.own) {
      row.onclick = () => choose(sandbox.id);
      row.onkeydown = ({ key }) => { if (key === "Enter") choose(sandbox.id); };
    } else {
      row.className = "foreign";
    }
    return row;
  }));
}

function choose(id) {
  if (id === chosen) return;
  terminal?.close();
  stopFollowing();
  [chosen, shownExec, terminal] = [id, "", null];
  at("detail").hidden = !id;
  at("exec").hidden = true;
  at("execs").replaceChildren();
  if (!id) return;
  at("detail-name").textContent = id;
  at("terminal-note").textContent = "";
  tab("terminal");
  refresh().catch((error) => say(error.message));
}

async function refreshDetail(sandbox) {
  const ready = sandbox?.state === "ready";
  at("detail-state").textContent = sandbox?.state ?? "ended";
  at("detail-state").className = `badge ${sandbox?.state ?? ""}`;
  for (const id of ["snapshot", "fork", "stop"]) at(id).disabled = !ready;
  if (!sandbox) return;
  at("detail-facts").textContent =
    [sandbox.image || "the default image", sandbox.engine, `idle for ${age(sandbox.idle)}`, sandbox.reason].filter(Boolean).join(" · ");
  const { execs } = await call("GET", sandboxPath(sandbox.id, "/execs"));
  if (sandbox.id !== chosen) return;
  at("execs").replaceChildren(...execs.toReversed().slice(0, 100).map((exec) => {
    const button = element("button", { type: "button", "data-exec": exec.execId },
      element("code", { text: exec.command }),
      element("span", { text: fate(exec), class: `badge ${exec.status}` }));
    button.onclick = () => showExec(exec);
    return element("li", {}, button);
  }));
}

const fate = ({ status, returncode }) => (status === "completed" && returncode ? `exit ${returncode}` : status);

function showExec(exec) {
  stopFollowing();
  shownExec = exec.execId;
  at("exec").hidden = false;
  at("exec-command").textContent = exec.command;
  showFate(exec);
  stopFollowing = follow(at("exec-output"), chosen, exec.execId, showFate);
}

function showFate(exec) {
  at("exec-status").textContent = fate(exec);
  at("exec-status").className = `badge ${exec.status}`;
  at("cancel").disabled = !["queued", "running"].includes(exec.status);
}

function tab(name) {
  for (const each of ["terminal", "commands"]) {
    at(`tab-${each}`).setAttribute("aria-selected", each === name);
    at(`${each}-panel`).hidden = each !== name;
  }
  if (name === "terminal" && chosen) {
    terminal ??= openTerminal(at("terminal"), at("terminal-note"), chosen);
    terminal.fit();
  }
}

at("tab-terminal").onclick = () => tab("terminal");
at("tab-commands").onclick = () => tab("commands");

// Doing

function act(button, what) {
  at(button).onclick = async () => {
    at(button).disabled = true;
    try {
      await what();
      await refresh();
    } catch (error) {
      say(error.message);
    } finally {
      at(button).disabled = false;
    }
  };
}

act("create", async () => {
  const image = at("image").value.trim();
  const { id } = await call("POST", "v1/sandboxes", image ? { image } : {});
  choose(id);
});

act("snapshot", async () => {
  const { snapshot } = await call("POST", sandboxPath(chosen, "/snapshot"), {});
  say(`Snapshot ${snapshot} is kept.`);
});

act("fork", async () => {
  const { sandboxes } = await call("POST", sandboxPath(chosen, "/fork"), { count: 1 });
  say(`Forked: ${sandboxes.map(({ id }) => id).join(", ")}`);
});

act("stop", async () => {
  if (!confirm(`Stop ${chosen}? What is not in a snapshot is lost.`)) return;
  await call("POST", sandboxPath(chosen, "/terminate"), { snapshotBeforeTerminate: false });
  choose("");
});

act("cancel", () => call("POST", sandboxPath(chosen, `/execs/${encodeURIComponent(shownExec)}/cancel`)));

at("run").onsubmit = async (event) => {
  event.preventDefault();
  const exec = { execId: uuid(), command: at("command").value, timeoutMs: 600_000 };
  try {
    const begun = await call("POST", sandboxPath(chosen, "/execs"), exec);
    at("command").value = "";
    showExec({ ...exec, ...begun });
    await refresh();
  } catch (error) {
    say(error.message);
  }
};

function say(text) {
  const message = element("p", { text });
  at("messages").append(message);
  setTimeout(() => message.remove(), 8000);
}

begin();
