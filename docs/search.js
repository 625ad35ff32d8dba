// The theme searches at each key: text that is pasted or dictated has none, so it gets one here.
// A leading - means "without" to the search: a flag is looked up without its dashes.
document.addEventListener("input", (event) => {
  const box = event.target;
  if (!box.matches(".md-search__input")) return;
  const words = box.value.replace(/(^|\s)-+(?=\w)/g, "$1");
  if (words !== box.value) box.value = words;
  box.dispatchEvent(new KeyboardEvent("keyup"));
}, true);
