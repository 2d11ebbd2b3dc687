// The language of the page: see ../assets/i18n.js.

import { setLanguage } from "../assets/i18n.js";

export * from "../assets/i18n.js";

export async function loadLanguage(wanted) {
  setLanguage(wanted, wanted === "en" ? {} : await (await fetch(`assets/${wanted}.json`)).json());
}
