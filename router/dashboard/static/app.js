// The frame of the dashboard: key, pages, feed, theme.
//
// A page is a module with
//   title, topics        its name, and the topics of the feed that it shows
//   mount(root, context) builds it below `root`, and returns { update(topic, data), close() }
// context: api(path, options) -> JSON (rejects with an Error whose message is for people; path below the
//          dashboard, or from / on), announce(text) for screen readers, args (parts of the address behind the
//          page's name), and go(page, ...args).

import { h, show } from './dom.js';
import { Feed, errorOf } from './feed.js';
import { milliseconds } from './format.js';
import * as experts from './pages/experts.js';
import * as fleet from './pages/fleet.js';
import * as layouts from './pages/layouts.js';
import * as loop from './pages/loop.js';
import * as requests from './pages/requests.js';

const PAGES = { fleet, requests, experts, loop, layouts };
const KEY = 'roost-dashboard-key'; // in this tab's session storage only
const THEMES = ['system', 'light', 'dark'];

const main = document.getElementById('main');
const nav = document.getElementById('pages');
const connection = document.getElementById('connection');
const announcer = document.getElementById('announcer');
const signOut = document.getElementById('sign-out');

let feed = null;
let mounted = null; // { name, view }: the page shown
let admitted = false;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function api(path, options = {}) {
  const answer = await fetch(new URL(path, new URL('../', import.meta.url)), {
    ...options,
    headers: { ...headers(), ...(options.body ? { 'content-type': 'application/json' } : {}) },
    cache: 'no-store',
  });
  if (answer.status === 401) askForKey('That key is no longer valid.');
  if (!answer.ok) throw new Error(await errorOf(answer));
  return answer.json();
}

function announce(text) {
  announcer.textContent = text;
}

/** Address of a page. */
export function address(page, ...args) {
  return `#/${[page, ...args.map(encodeURIComponent)].join('/')}`;
}

function place() {
  const [name, ...args] = location.hash.replace(/^#\/?/, '').split('/');
  return { name: Object.hasOwn(PAGES, name) ? name : 'fleet', args: args.map(decodeURIComponent) };
}

function state(text, kind) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.className = `connection ${kind}`;
}

function open() {
  const { name, args } = place();
  leave();
  const topics = PAGES[name].topics;
  state('connecting…', 'waiting');
  feed = new Feed(topics, headers, {
    opened: () => {
      admit();
      if (mounted === null) enter(name, args);
      state('live', 'live');
    },
    event: (topic, data) => mounted?.view.update(topic, data),
    lost: (reason, wait) => state(`not live: ${reason}; next attempt in ${milliseconds(wait)}`, 'lost'),
    refused: (status, message) => askForKey(status === 401 && !sessionStorage.getItem(KEY) ? '' : message),
  });
}

function leave() {
  feed?.close();
  feed = null;
  mounted?.view.close?.();
  mounted = null;
}

function enter(name, args) {
  const page = PAGES[name];
  document.title = `${page.title} · Roost`;
  show(main);
  mounted = { name, view: page.mount(main, { api, announce, args, address, go: (...to) => { location.hash = address(...to); } }) };
  for (const link of nav.querySelectorAll('a')) {
    if (link.dataset.page === name) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
}

function admit() {
  if (admitted) return;
  admitted = true;
  nav.hidden = false;
  signOut.hidden = !sessionStorage.getItem(KEY);
}

/** Show nothing but the question for a key. */
function askForKey(message) {
  leave();
  admitted = false;
  nav.hidden = true;
  signOut.hidden = true;
  sessionStorage.removeItem(KEY);
  state('', '');
  document.title = 'Key · Roost';
  const input = h('input', {
    id: 'key', type: 'password', autocomplete: 'off', spellcheck: 'false', required: true,
    'aria-describedby': message ? 'key-message' : null,
  });
  const form = h('form', { class: 'ask' },
    h('h1', {}, 'This router asks for a key'),
    h('p', {}, 'The dashboard needs a key with the right “admin”. It is kept in this tab only.'),
    message ? h('p', { id: 'key-message', class: 'error', role: 'alert' }, message) : null,
    h('label', { for: 'key' }, 'API key'),
    input,
    h('button', { type: 'submit' }, 'Open'));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    open();
  });
  show(main, form);
  input.focus();
}

function drawTheme(button) {
  const now = localStorage.getItem('roost-theme') ?? 'system';
  button.textContent = `Theme: ${now}`;
  if (now === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = now;
  window.dispatchEvent(new Event('themechange'));
}

function start() {
  for (const [name, page] of Object.entries(PAGES)) {
    nav.append(h('a', { href: address(name), 'data-page': name }, page.title));
  }
  const theme = document.getElementById('theme');
  theme.addEventListener('click', () => {
    const now = localStorage.getItem('roost-theme') ?? 'system';
    localStorage.setItem('roost-theme', THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
    drawTheme(theme);
    announce(theme.textContent);
  });
  drawTheme(theme);
  signOut.addEventListener('click', () => askForKey(''));
  document.querySelector('.skip').addEventListener('click', (event) => {
    event.preventDefault(); // the address belongs to the pages
    main.focus();
  });
  window.addEventListener('hashchange', () => {
    open();
    main.focus({ preventScroll: true });
  });
  open();
}

start();
