import { h } from '../dom.js';

export const title = 'Layouts';
export const topics = ['fleet'];

/** Build the page. */
export function mount(root) {
  root.append(h('h1', {}, title), h('p', {}, 'This page is being built.'));
  return { update() {} };
}
