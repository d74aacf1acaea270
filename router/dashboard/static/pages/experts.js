// Experts: demand for experts against their placement, with maps of one engine.

import { h, setText, show } from '../dom.js';
import { count, digits, percent, short } from '../format.js';
import { HeatMap, decoded } from '../heatmap.js';
import { Table } from '../table.js';

export const title = 'Experts';
export const topics = ['experts'];

const LEAST_PAUSE = 3000; // between two requests for maps
const times = (value) => `${digits(value)}×`;

function tile(root, label) {
  const value = h('dd');
  const note = h('dd', { class: 'note' });
  root.append(h('div', { class: 'tile' }, h('dt', {}, label), value, note));
  return (text, more = '') => {
    setText(value, text);
    setText(note, more);
  };
}

/** State of the demand for all models: [kind, sentence]. */
function judged(models) {
  const silent = models.filter((one) => one.silence);
  if (silent.length) return ['warning', `Demand is not known: ${silent[0].silence}${silent.length > 1 ? ` (${silent.length} models)` : ''}`];
  const shifted = models.filter((one) => one.shifted);
  if (shifted.length) return ['warning', `Demand is shifting: ${shifted.map((one) => one.model).join(', ')}`];
  if (!models.length) return ['', 'No engine reports experts.'];
  if (models.every((one) => one.tokens === 0)) return ['', 'No demand has been reported yet.'];
  if (models.every((one) => one.divergence === null || one.threshold === null)) return ['', 'Too little traffic to tell a shift of demand from noise.'];
  return ['well', 'Demand is steady: no shift beyond noise.'];
}

function drift(model) {
  if (model.divergence === null || model.threshold === null) return ['–', 'too little data to tell'];
  return [digits(1000 * model.divergence), `millinats; a shift is above ${digits(1000 * model.threshold)}`];
}

const ENGINES = (address) => [
  {
    title: 'Engine',
    value: (row, cell) => {
      cell.link ??= h('a', { href: address('experts', row.engine) }, row.engine);
      return cell.link;
    },
    sort: (row) => row.engine,
  },
  { title: 'Model', value: (row) => row.model, sort: (row) => row.model },
  { title: 'Epoch', numeric: true, about: 'Number of handovers so far.', value: (row) => count(row.epoch), sort: (row) => row.epoch },
  { title: 'Ranks', numeric: true, value: (row) => count(row.ranks), sort: (row) => row.ranks },
  { title: 'Layers × experts', value: (row) => `${row.layers} × ${row.experts}` },
  { title: 'Replicated experts', numeric: true, about: 'Experts of a layer of which several ranks hold a copy.', value: (row) => count(row.replicated), sort: (row) => row.replicated },
  { title: 'Most replicas', numeric: true, value: (row) => count(row.most_replicas), sort: (row) => row.most_replicas },
  { title: 'Empty slots', numeric: true, value: (row) => count(row.empty_slots), sort: (row) => row.empty_slots },
  { title: 'Sharded layers', value: (row) => row.sharded || 'none' },
  { title: 'Demand', unit: 'tokens/s', numeric: true, value: (row) => short(row.tokens_per_second), sort: (row) => row.tokens_per_second },
  { title: 'Remote demand', numeric: true, about: 'Share of expert activations that the rank of the request does not hold, and must send to others.', value: (row) => percent(row.remote), sort: (row) => row.remote ?? -1 },
];

const LAYERS = [
  { title: 'Layer', numeric: true, value: (row) => String(row.layer), sort: (row) => row.layer },
  { title: 'Hottest expert', unit: '× even share', numeric: true, about: 'Demand for the most popular expert of the layer; 1 would be an even share.', value: (row) => digits(row.skew), sort: (row) => row.skew },
  { title: 'Top tenth of experts', numeric: true, value: (row) => percent(row.top_tenth), sort: (row) => row.top_tenth },
  { title: 'Expected balance', numeric: true, about: 'Mean over highest load that this placement gives the ranks: 1 is even.', value: (row) => digits(row.balance), sort: (row) => row.balance },
  { title: 'Busiest rank', numeric: true, value: (row) => String(row.busiest), sort: (row) => row.busiest },
  {
    title: 'Most popular experts: demand, and where they are',
    value: (row) => row.hottest.slice(0, 3).map((one) => `${one.expert} (${times(one.demand)}, ${placeOf(one)})`).join('; '),
  },
];

function placeOf({ replicas, ranks }) {
  if (!replicas) return 'sharded';
  return `${replicas > 1 ? 'ranks' : 'rank'} ${ranks.join(', ')}${replicas > ranks.length ? ', …' : ''}`;
}

const RANKS = [
  { title: 'Rank', numeric: true, value: (row) => String(row.rank), sort: (row) => row.rank },
  { title: 'Node', value: (row) => row.node, sort: (row) => row.node },
  { title: 'Own requests', unit: 'tokens/s', numeric: true, value: (row) => short(row.tokens_per_second), sort: (row) => row.tokens_per_second ?? -1 },
  { title: 'Remote demand', numeric: true, value: (row) => percent(row.remote), sort: (row) => row.remote ?? -1 },
  { title: 'Expected load', unit: '× mean', numeric: true, value: (row) => digits(row.load), sort: (row) => row.load },
];

/** Build the page. */
export function mount(root, { api, args, address, go }) {
  const verdict = h('p', { class: 'verdict' });
  const tiles = h('dl', { class: 'tiles' });
  const overview = h('section', { 'aria-label': 'Engines' });
  const choice = h('select', { id: 'engine' });
  const spell = h('select', { id: 'spell' }, h('option', { value: 'demand' }, 'last minutes'), h('option', { value: 'recent' }, 'last seconds'));
  const about = h('p', { class: 'about' });
  const maps = h('div', { class: 'maps' });
  const [ofLayers, ofRanks] = [h('section', { 'aria-label': 'Layers' }), h('section', { 'aria-label': 'Ranks' })];
  const detail = h('section', { 'aria-labelledby': 'engine-title', hidden: true },
    h('div', { class: 'bar-of-section' }, h('h2', { id: 'engine-title' }, 'Demand against placement'),
      h('label', { for: 'engine' }, 'Engine'), choice, h('label', { for: 'spell' }, 'Demand of the'), spell),
    about, maps, ofLayers, ofRanks);
  root.append(h('h1', {}, title), verdict,
    h('section', { 'aria-label': 'Demand' }, h('h2', { class: 'visually-hidden' }, 'Demand'), tiles), overview, detail);

  const shown = {
    tokens: tile(tiles, 'Demand'), skew: tile(tiles, 'Hottest expert of a layer'), tenth: tile(tiles, 'Top tenth of experts'),
    drift: tile(tiles, 'Drift'), clusters: tile(tiles, 'Clusters of requests'), gain: tile(tiles, 'Proven value of prediction'),
  };
  const engines = new Table(overview, { caption: 'Placement of each engine; choose one for its maps', columns: ENGINES(address), key: (row) => row.engine, empty: 'No engine reports experts.' });
  let now = null; // maps of the chosen engine
  const demand = new HeatMap(maps, {
    title: 'Demand', about: 'Tokens routed to each expert, relative to an even share of its layer.',
    rows: 'layer', columns: 'expert', unit: '× even share (square-root colours)', text: times,
    read: (layer, expert, value) => `Layer ${layer}, expert ${expert}: ${times(value)} the even share; ${replicas(layer, expert)}`,
  });
  const holders = new HeatMap(maps, {
    title: 'Replicas', about: 'Copies of each expert over all ranks; 0 where the layer is sharded.',
    rows: 'layer', columns: 'expert', unit: 'replicas', least: 4, text: (value) => String(Math.round(value)),
    read: (layer, expert) => `Layer ${layer}, expert ${expert}: ${replicas(layer, expert)}`,
  });
  const load = new HeatMap(maps, {
    title: 'Expected load', scale: 'signed', about: 'Load that the placement gives each rank at the demand of the last seconds; blue ranks have less than the mean, orange ones more.',
    rows: 'layer', columns: 'rank', unit: '× mean of the ranks', text: times,
    read: (layer, rank, value) => `Layer ${layer}, rank ${rank}: ${times(value)} the mean load`,
  });
  const layers = new Table(ofLayers, { caption: 'Layers of the engine', columns: LAYERS, key: (row) => String(row.layer), most: 12 });
  const ranks = new Table(ofRanks, { caption: 'Ranks of the engine', columns: RANKS, key: (row) => String(row.rank), most: 16 });

  function replicas(layer, expert) {
    const copies = Math.round(now.replicas.levels[layer * now.replicas.columns + expert] * now.replicas.unit);
    return copies === 0 ? 'sharded over all ranks' : copies === 1 ? '1 replica' : `${copies} replicas`;
  }

  let picture = null;
  let chosen = args[0] ?? null;
  let asking = false;
  let askedAt = 0;
  let retry = null;
  let closed = false;

  choice.addEventListener('change', () => go('experts', choice.value));
  spell.addEventListener('change', drawMaps);

  function drawMaps() {
    if (now === null) return;
    demand.update(now[spell.value]);
    holders.update(now.replicas);
    load.update(now.load);
    layers.update(now.layers);
    ranks.update(now.ranks);
    setText(about, `${now.engine}, model ${now.model}, epoch ${now.epoch}${now.known ? '' : ' · the tracker knows no demand yet: it is taken as even'} · the expected load assumes that the requests of all ranks use the experts alike`);
    maps.dataset.version = now.maps;
  }

  /** Ask for the maps of the chosen engine if they have changed, and not too often. */
  async function refresh() {
    const engine = picture?.engines.find((one) => one.engine === chosen);
    if (!engine || asking || closed || now?.maps === engine.maps) return;
    const wait = now?.engine === chosen ? askedAt + LEAST_PAUSE - Date.now() : 0;
    if (wait > 0) {
      retry ??= setTimeout(() => { retry = null; refresh(); }, wait);
      return;
    }
    asking = true;
    askedAt = Date.now();
    try {
      const found = await api(`experts/${encodeURIComponent(chosen)}`);
      if (closed) return;
      now = { ...found, demand: decoded(found.demand), recent: decoded(found.recent), replicas: decoded(found.replicas), load: decoded(found.load) };
      drawMaps();
    } catch (error) {
      setText(about, `The maps cannot be read: ${error.message}`);
    } finally {
      asking = false;
    }
  }

  function update(_, data) {
    picture = data;
    const [kind, sentence] = judged(data.models);
    verdict.className = `verdict ${kind}`;
    setText(verdict, sentence);
    engines.update(data.engines);
    if (!data.engines.some((one) => one.engine === chosen) && !args.length) chosen = data.engines[0]?.engine ?? null;
    const engine = data.engines.find((one) => one.engine === chosen);
    detail.hidden = !engine;
    const names = data.engines.map((one) => one.engine);
    if (choice.dataset.names !== names.join('\n')) {
      choice.dataset.names = names.join('\n');
      show(choice, names.map((name) => h('option', { value: name, selected: name === chosen }, name)));
    }
    const model = data.models.find((one) => one.model === engine?.model) ?? data.models[0];
    if (model) {
      shown.tokens(short(model.tokens_per_second), `tokens/s, ${model.model}`);
      shown.skew(model.skew ? times(model.skew) : '–', 'its even share, mean over layers');
      shown.tenth(model.top_tenth ? percent(model.top_tenth) : '–', 'of the demand, mean over layers');
      shown.drift(...drift(model));
      shown.clusters(count(model.clusters), 'groups of requests with experts of their own');
      shown.gain(percent(model.gain), 'of the predicted gain counts in decisions');
    }
    refresh();
  }

  return {
    update,
    close() {
      closed = true;
      clearTimeout(retry);
      [demand, holders, load].forEach((one) => one.close());
    },
  };
}
