// The data of the page, and its language.

function readData() {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const wanted = preferredLanguage();
  setLanguage(wanted, wanted === "en" ? {} : read("texts")[wanted]);
  return read("data");
}

function languageMenu() {
  const options = Object.entries(LANGUAGES).map(([code, name]) => el("option", { value: code, text: name, selected: code === language }));
  const menu = el("select", { class: "quiet language", "aria-label": t("Language"), onchange: () => choose(menu.value) }, ...options);
  const choose = (code) => {
    keepLanguage(code);
    const address = new URL(location.href);
    address.searchParams.delete("lang");
    if (address.href === location.href) location.reload();
    else location.replace(address.href);
  };
  return menu;
}
