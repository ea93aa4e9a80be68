// Conversations of earlier, in this browser's localStorage: each under its own name, the newest
// first. Where the browser's room ends the oldest go; where it stores nothing they live until the
// page is closed.

const PREFIX = "headway-chat-",
  OPEN = "headway-open-chat",
  SETTINGS = "headway-settings";
const MOST = 200,
  TITLE_CHARS = 60;

/** An object of the store, or null where there is none or it cannot be read. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const isConversation = (one) =>
  typeof one?.id === "string" && typeof one.title === "string" && Array.isArray(one.turns);

/** The first line of the first question. */
export const titleOf = (turns) => {
  const line = (turns[0]?.content ?? "").trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS)}…` : line || "Untitled";
};

export const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");

export const all = () =>
  Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => parsed(localStorage.getItem(name)))
    .filter(isConversation)
    .sort((a, b) => b.updatedMs - a.updatedMs);

export function save(conversation) {
  const kept = { ...conversation, updatedMs: Date.now() };
  const older = all().filter((one) => one.id !== kept.id);
  for (const one of older.splice(MOST - 1)) remove(one.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + kept.id, JSON.stringify(kept));
      return true;
    } catch {
      if (!older.length) return false;
      remove(older.pop().id);
    }
  }
}

export const load = (id) => {
  const found = parsed(localStorage.getItem(PREFIX + id));
  return isConversation(found) ? found : null;
};
export const remove = (id) => localStorage.removeItem(PREFIX + id);
export const lastOpen = () => load(sessionStorage.getItem(OPEN) ?? "");
export const markOpen = (id) => sessionStorage.setItem(OPEN, id);
export const close = () => sessionStorage.removeItem(OPEN);
export const settings = () => parsed(localStorage.getItem(SETTINGS)) ?? {};
export function saveSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // no room: the settings hold until the page is closed
  }
}
