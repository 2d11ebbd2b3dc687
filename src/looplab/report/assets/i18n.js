// Texts in the language of the reader. English is the key; `zh.json` has the others. `?lang=zh`, what was chosen before
// and the browser's language choose.
//
//   setLanguage(language, texts)             before anything is drawn
//   t("{n} {n|file|files}", {n: 2})          {name}: a value; {name|one|many}: a word by the number of that name
//   inLanguage({en: "…", zh: "…"})           a text that the server made in each language
//   ago(seconds), clock(at), day(at)         times in the language of the page

let texts = {};
export let language = "en";
export const LANGUAGES = { en: "English", zh: "\u4e2d\u6587" };
const CHOICE = "looplab-lang";

export function preferredLanguage() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(CHOICE);
  } catch {
    // a file that may not keep anything
  }
  const asked = new URLSearchParams(location.search).get("lang") || chosen;
  const wanted = [asked, ...(navigator.languages || [navigator.language])].filter(Boolean);
  return wanted.map((one) => one.slice(0, 2).toLowerCase()).find((one) => one in LANGUAGES) || "en";
}

export function keepLanguage(code) {
  try {
    localStorage.setItem(CHOICE, code);
  } catch {
    // it is chosen again next time
  }
}

export function setLanguage(wanted, found) {
  language = wanted;
  texts = found;
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
}

export function t(key, values = {}) {
  const text = texts[key] || key;
  return text.replace(/\{(\w+)(?:\|([^|}]*)\|([^}]*))?\}/g, (_, name, one, many) => {
    if (one !== undefined) return Number(values[name]) === 1 ? one : many;
    return values[name] === undefined ? "" : String(values[name]);
  });
}

export const inLanguage = (made) => (made && made[language]) || (made && made.en) || "";

export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return t("{n} s", { n: Math.max(0, Math.round(seconds)) });
  if (seconds < 5400) return t("{n} min", { n: Math.round(seconds / 60) });
  if (seconds < 129600) return t("{n} h", { n: Number((seconds / 3600).toPrecision(2)) });
  return t("{n} {n|day|days}", { n: Math.round(seconds / 86400) });
}

const padded = (number) => String(number).padStart(2, "0");
export function clock(at) {
  const time = new Date(at * 1000);
  return `${padded(time.getHours())}:${padded(time.getMinutes())}:${padded(time.getSeconds())}`;
}
export function day(at) {
  const time = new Date(at * 1000);
  const year = time.getFullYear() === new Date().getFullYear() ? "" : `${time.getFullYear()}-`;
  return `${year}${padded(time.getMonth() + 1)}-${padded(time.getDate())} ${padded(time.getHours())}:${padded(time.getMinutes())}`;
}
