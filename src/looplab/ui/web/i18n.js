// Texts of the page. English is the key; `LANGUAGE.json` has the others. `?lang=zh` and the browser's language choose.
//
//   t("{n} {n|file|files}", {n: 2})      {name}: a value; {name|one|many}: a word by the number of that name
//   await loadLanguage(language)             before anything is drawn
//   ago(seconds), clock(at), day(at)         times in the language of the page

let texts = {};
export let language = "en";
export const LANGUAGES = { en: "English", zh: "\u4e2d\u6587" };

export function preferredLanguage() {
  const asked = new URLSearchParams(location.search).get("lang") || localStorage.getItem("looplab-lang");
  const wanted = [asked, ...(navigator.languages || [navigator.language])].filter(Boolean);
  return wanted.map((one) => one.slice(0, 2).toLowerCase()).find((one) => one in LANGUAGES) || "en";
}

export async function loadLanguage(wanted) {
  language = wanted in LANGUAGES ? wanted : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
  texts = language === "en" ? {} : await (await fetch(`web/${language}.json`)).json();
}

export function t(key, values = {}) {
  const text = texts[key] || key;
  return text.replace(/\{(\w+)(?:\|([^|}]*)\|([^}]*))?\}/g, (_, name, one, many) => {
    if (one !== undefined) return Number(values[name]) === 1 ? one : many;
    return values[name] === undefined ? "" : String(values[name]);
  });
}

export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return t("{n} s", { n: Math.max(0, Math.round(seconds)) });
  if (seconds < 5400) return t("{n} min", { n: Math.round(seconds / 60) });
  if (seconds < 129600) return t("{n} h", { n: Number((seconds / 3600).toPrecision(2)) });
  return t("{n} {n|day|days}", { n: Math.round(seconds / 86400) });
}

const two = (number) => String(number).padStart(2, "0");
export function clock(at) {
  const time = new Date(at * 1000);
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}
export function day(at) {
  const time = new Date(at * 1000);
  const year = time.getFullYear() === new Date().getFullYear() ? "" : `${time.getFullYear()}-`;
  return `${year}${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
}
