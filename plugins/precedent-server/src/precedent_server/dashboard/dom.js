// Builds the page's elements. A text enters it as a text node, so no text can become markup.

export const byId = (id) => document.getElementById(id);

/** Makes an element with properties; children that are strings become text nodes. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Makes a number readable: at most so many digits after the point, in the reader's own notation. */
export function written(number, digits = 0) {
  return number.toLocaleString(undefined, { maximumFractionDigits: digits });
}
