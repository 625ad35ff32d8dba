// The search takes a leading - for "without": a flag is looked up without its dashes.
document.addEventListener("keyup", (event) => {
  const box = event.target;
  if (!box.matches || !box.matches(".md-search__input")) return;
  const words = box.value.replace(/(^|\s)-+(?=\w)/g, "$1");
  if (words !== box.value) box.value = words;
}, true);
