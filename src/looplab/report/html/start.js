// The data of the page, and its language.

function readData() {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const wanted = preferredLanguage();
  setLanguage(wanted, wanted === "en" ? {} : read("texts")[wanted]);
  return read("data");
}

function chooseLanguage(code) {
  keepLanguage(code);
  const address = new URL(location.href);
  address.searchParams.delete("lang");
  if (address.href === location.href) location.reload();
  else location.replace(address.href);
}
