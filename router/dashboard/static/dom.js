// Elements from values. Text always becomes a text node, never markup.

/** Create an element: h('a', { href: '#/fleet', class: 'x', onclick: f }, 'text', child, ...). */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Create an SVG element. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Set an element's text only if it differs, so that unchanged cells cost no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replace an element's children. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A button that copies a text and says so. */
export function copyButton(text, what, announce) {
  const button = h('button', { type: 'button', class: 'small', 'aria-label': `Copy ${what}` }, 'Copy');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = 'Copied';
      announce(`${what} copied`);
    } catch {
      button.textContent = 'Select and copy by hand'; // no clipboard without HTTPS
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  });
  return button;
}
