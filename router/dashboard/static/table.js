// A table that is updated in place: rows keep their elements, unchanged cells are not touched.

import { h, setText } from './dom.js';

/** What columns mean, closed until it is asked for; null: none needs words. */
function glossary(columns) {
  const explained = columns.filter((column) => column.about);
  if (!explained.length) return null;
  return h('details', { class: 'glossary' }, h('summary', {}, 'What the columns mean'),
    h('dl', {}, explained.map((column) => [h('dt', {}, column.title), h('dd', {}, column.about)])));
}

/**
 * columns: { title, unit, numeric, about, value(row) -> text or element, sort(row) -> number or text,
 * class(row) }. about: what the column means, listed below the table where it is asked for.
 * key(row) -> text. detail(row) -> element, shown below a row when it is opened; its `update(row)` is called
 * with every change. most: rows shown before "show all".
 */
export class Table {
  constructor(root, { caption, columns, key, detail = null, empty = 'Nothing here.', most = 200, sorted = null }) {
    Object.assign(this, { columns, key, detail, empty, most, sorted });
    this.rows = [];
    this.lines = new Map();
    this.opened = new Set();
    this.body = h('tbody');
    this.heads = columns.map((column, at) => this.head(column, at));
    this.more = h('button', { type: 'button', class: 'small', hidden: true, onclick: () => this.showAll() });
    const table = h('table', {}, h('caption', {}, caption),
      h('thead', {}, h('tr', {}, detail ? h('td', { class: 'opener' }) : null, this.heads)), this.body);
    root.append(h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption }, table), this.more, glossary(columns) ?? '');
    this.drawHeads();
  }

  head(column, at) {
    const title = column.unit ? `${column.title} (${column.unit})` : column.title;
    if (!column.sort) return h('th', { scope: 'col', class: column.numeric ? 'numeric' : null }, title);
    const button = h('button', { type: 'button', class: 'sort', onclick: () => this.sortBy(at) }, title);
    return h('th', { scope: 'col', class: column.numeric ? 'numeric' : null }, button);
  }

  sortBy(at) {
    const again = this.sorted?.at === at;
    this.sorted = { at, down: again ? !this.sorted.down : Boolean(this.columns[at].numeric) };
    this.drawHeads();
    this.update(this.rows);
  }

  drawHeads() {
    this.heads.forEach((head, at) => {
      if (this.sorted?.at === at) head.setAttribute('aria-sort', this.sorted.down ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
    });
  }

  showAll() {
    this.most = Infinity;
    this.update(this.rows);
  }

  update(rows) {
    this.rows = rows;
    const shown = this.order(rows).slice(0, this.most);
    this.more.hidden = shown.length === rows.length;
    setText(this.more, `Show all ${rows.length} rows`);
    const elements = [];
    const seen = new Set();
    for (const row of shown) {
      const key = this.key(row);
      seen.add(key);
      elements.push(...this.line(key, row));
    }
    for (const key of this.lines.keys()) if (!seen.has(key)) this.lines.delete(key);
    if (!shown.length) elements.push(this.emptyRow ??= h('tr', {}, h('td', { colspan: this.columns.length + 1, class: 'empty' }, this.empty)));
    this.place(elements);
  }

  order(rows) {
    if (!this.sorted) return rows;
    const { sort } = this.columns[this.sorted.at];
    const sign = this.sorted.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [sort(a), sort(b)];
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
  }

  /** Put the rows in order, moving as few as possible. */
  place(elements) {
    let at = this.body.firstChild;
    for (const element of elements) {
      if (element === at) at = at.nextSibling;
      else this.body.insertBefore(element, at);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  line(key, row) {
    let line = this.lines.get(key);
    if (!line) {
      line = this.create(key);
      this.lines.set(key, line);
    }
    line.row = row;
    this.columns.forEach((column, at) => {
      const cell = line.cells[at];
      const value = column.value(row, cell);
      if (value instanceof Node) {
        if (cell.firstChild !== value) cell.replaceChildren(value);
      } else setText(cell, value);
      if (column.class) {
        const name = `${column.numeric ? 'numeric ' : ''}${column.class(row)}`;
        if (cell.className !== name) cell.className = name;
      }
    });
    if (this.opened.has(key)) {
      line.below ??= this.below(line);
      line.detail.update?.(row);
      return [line.element, line.below];
    }
    return [line.element];
  }

  create(key) {
    const cells = this.columns.map((column, at) => h(at === 0 ? 'th' : 'td', {
      scope: at === 0 ? 'row' : null, class: column.numeric ? 'numeric' : null,
    }));
    const line = { cells, row: null, below: null, detail: null };
    let opener = null;
    if (this.detail) {
      line.button = h('button', { type: 'button', class: 'open', 'aria-expanded': 'false', 'aria-label': `Details of ${key}`, onclick: () => this.toggle(key) });
      opener = h('td', { class: 'opener' }, line.button);
    }
    line.element = h('tr', {}, opener, cells);
    return line;
  }

  below(line) {
    line.detail = this.detail(line.row);
    return h('tr', { class: 'below' }, h('td', { colspan: this.columns.length + 1 }, line.detail.element ?? line.detail));
  }

  toggle(key) {
    if (!this.opened.delete(key)) this.opened.add(key);
    this.lines.get(key).button.setAttribute('aria-expanded', String(this.opened.has(key)));
    this.update(this.rows);
  }
}
