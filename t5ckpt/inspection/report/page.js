'use strict';
// The facts are strings from checkpoints of unknown origin: they become text nodes, and text of Plotly only through plain().

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASH = '–';

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'style') for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Plotly reads a few HTML tags and entities in its texts.
const plain = (text) => String(text).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
const short = (text, length) => (text.length <= length ? text : '…' + text.slice(1 - length));

// May break after each slash.
const broken = (text) => text.split('/').flatMap((key, at, all) => (at < all.length - 1 ? [key + '/', make('wbr')] : [key]));

const whole = (value) => value.toLocaleString('en-US');
const number = (value) => (value === 'inf' ? Infinity : value === '-inf' ? -Infinity : value === null ? NaN : value);
function digits(value) {
  value = number(value);
  if (Number.isNaN(value)) return DASH;
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  return text.replace('-', '−').replace('e−', 'e-');
}
function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let at = 0;
  while (value >= 999.95 && at < units.length - 1) { value /= 1000; at += 1; }
  return at ? `${value.toFixed(1)} ${units[at]}` : `${value} B`;
}
// layers_2 before layers_10; the collator is made once, since it takes most of the time.
const collator = new Intl.Collator('en', { numeric: true });
const natural = (a, b) => collator.compare(a, b);
const counted = (count, one, several) => `${whole(count)} ${count === 1 ? one : several || one + 's'}`;
const shape = (sizes) => (sizes.length ? sizes.map(whole).join(' × ') : 'scalar');
const moment = (seconds) => (seconds === null ? DASH : new Date(seconds * 1000).toISOString().slice(0, 16).replace('T', ' '));

// --- figures ----------------------------------------------------------------------------------------------------------

const figures = new Map();
function draw(id, build) {
  figures.set(id, build);
  if (!window.Plotly) return;
  const { data, layout, click } = build();
  const base = {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: { color: css('--text'), size: 12, family: 'system-ui, sans-serif' },
    margin: { l: 64, r: 16, t: 10, b: 40 }, hoverlabel: { bgcolor: css('--panel'), bordercolor: css('--line'), font: { color: css('--text') }, align: 'left', namelength: 0 },
    colorway: [0, 1, 2, 3, 4, 5].map((at) => css(`--c${at}`)),
  };
  const node = $(id);
  window.Plotly.react(node, data, { ...base, ...layout }, { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: 'reset' });
  if (click && node.on && !node.dataset.clicks) { node.dataset.clicks = '1'; node.on(click[0], click[1]); }
}
const redraw = () => { for (const [id, build] of figures) draw(id, build); };
const axis = (more) => ({ automargin: true, exponentformat: 'e', gridcolor: css('--grid'), zerolinecolor: css('--grid'), linecolor: css('--line'), tickfont: { color: css('--dim') }, ...more });
const figure = (id, label, caption, height) =>
  make('figure', {}, make('div', { id, class: 'plot', role: 'img', 'aria-label': label, style: { height: `${height}px` } }), make('figcaption', {}, caption));

// --- tables -----------------------------------------------------------------------------------------------------------

// columns: {title, right, value(row) to sort by, cell(row) -> text or node}
function table(columns, rows, { page = 100, label, sort = null, descending = false }) {
  let [by, down, shown, list] = [sort, descending, page, rows];
  const body = make('tbody');
  const more = make('button', { type: 'button', class: 'more', onclick: () => { const before = shown; shown += page; fill(); body.rows[before]?.querySelector('button')?.focus(); } });
  const heads = columns.map((column, at) => {
    const button = column.value && make('button', { type: 'button', onclick: () => { down = by === at ? !down : Boolean(column.right); by = at; shown = page; fill(); } }, column.title);
    return make('th', { scope: 'col', class: column.right && 'num' }, button || column.title);
  });
  function sorted() {
    if (by === null) return list;
    const key = columns[by].value;
    const sign = down ? -1 : 1;
    const rank = (value) => (typeof value === 'number' && Number.isNaN(value) ? null : value);
    return [...list].sort((a, b) => {
      const [x, y] = [rank(key(a)), rank(key(b))];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === 'string' ? natural(x, y) : x < y ? -1 : x > y ? 1 : 0);
    });
  }
  function fill(next) {
    if (next) { list = next; shown = page; }
    heads.forEach((head, at) => (at === by ? head.setAttribute('aria-sort', down ? 'descending' : 'ascending') : head.removeAttribute('aria-sort')));
    body.replaceChildren(...sorted().slice(0, shown).map((row) => make('tr', {}, columns.map((column) => make('td', { class: [column.right && 'num', column.class].filter(Boolean).join(' ') }, column.cell(row))))));
    more.hidden = shown >= list.length;
    more.textContent = `Show ${whole(Math.min(page, list.length - shown))} more of ${whole(list.length)}`;
  }
  fill();
  const node = make('div', {}, make('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label }, make('table', {}, make('caption', { class: 'skip' }, label), make('thead', {}, make('tr', {}, heads)), body)), more);
  return { node, fill };
}

const folded = (title, open, ...children) => make('details', { open }, make('summary', {}, title), children);

const MOMENTS = /(^|\/)(opt_state|param_states|\d+\/(mu|nu|trace))\//;

// A table of leaves with a filter by name. The optimizer's moments are folded where there are other leaves.
function leafTable(columns, rows, options) {
  const parts = [rows.filter((row) => !MOMENTS.test(row.name)), rows.filter((row) => MOMENTS.test(row.name))];
  const [others, moments] = parts.map((part, at) => table(columns, part, { ...options, label: at ? `${options.label}: moments of the optimizer` : options.label }));
  const fold = folded('', false, moments.node);
  function fill() {
    const words = box.value.toLowerCase().split(/\s+/);
    const shown = parts.map((part) => part.filter((row) => words.every((word) => row.name.toLowerCase().includes(word))));
    others.fill(shown[0]);
    moments.fill(shown[1]);
    fold.hidden = !shown[1].length;
    fold.open = !shown[0].length;
    fold.firstChild.textContent = `Moments of the optimizer: ${counted(shown[1].length, 'leaf', 'leaves')}`;
  }
  const box = make('input', { type: 'search', placeholder: 'Filter by name', 'aria-label': `${options.label}: filter by name`, oninput: fill });
  fill();
  return make('div', { class: 'panel' }, box, others.node, fold);
}

const hist = (stats) => {
  const most = Math.max(...stats.counts, 1);
  const width = 100 / stats.counts.length;
  const points = stats.counts.flatMap((count, at) => [at, at + 1].map((edge) => `${(edge * width).toFixed(2)}% ${(100 - (100 * count) / most).toFixed(1)}%`));
  return make('span', { class: 'hist', role: 'img', 'aria-label': `histogram from ${digits(stats.low)} to ${digits(stats.high)}`, title: `${digits(stats.low)} to ${digits(stats.high)}`, style: { 'clip-path': `polygon(0 100%, ${points.join(',')}, 100% 100%)` } });
};

// --- the run ----------------------------------------------------------------------------------------------------------

const GROUPS = [
  ['pinned', '--c3', (step) => step.pinned],
  ['deleted by the next save', '--c2', (step) => step.goes],
  ['not readable', '--c4', (step) => step.state !== 'complete'],
  ['kept', '--c1', () => true],
];

const ofPoints = ({ points }, choose) => { const finite = points.map((point) => number(point[2])).filter(Number.isFinite); return finite.length ? choose(...finite) : null; };

function runSection(facts) {
  const steps = facts.steps;
  const saved = [...new Set(steps.flatMap((step) => Object.keys(step.metrics)))].sort();
  const curves = new Map(facts.curves.map((curve) => [curve.name, curve]));
  const isCompared = (name) => facts.compared.includes(name);
  const others = saved.filter((name) => !isCompared(name));
  const metrics = [...new Set([...[...saved, ...curves.keys()].filter(isCompared), ...saved, ...curves.keys()])];
  const chosen = new Set(metrics.slice(0, 4));
  let time = false;
  const marks = facts.changes ? facts.changes.steps : [facts.checkpoint.step];
  const at = (step) => (time ? new Date(step.created * 1000).toISOString() : step.step);
  const timed = steps.filter((step) => step.created !== null);

  function build() {
    const list = time ? timed : steps;
    const names = metrics.filter((name) => chosen.has(name));
    const rows = names.length + 1;
    const gap = 0.26 / (rows + 1);
    const height = (1 - gap * (rows - 1)) / rows;
    const layout = { showlegend: true, legend: { orientation: 'h', x: 0, xanchor: 'left', yref: 'container', y: 1, yanchor: 'top', font: { color: css('--dim') } }, margin: { l: 60, r: 8, t: 52, b: 42 }, barmode: 'overlay', hovermode: 'closest', annotations: [], shapes: [] };
    layout.xaxis = axis({ title: { text: time ? 'saved (UTC)' : 'step' }, anchor: `y${rows === 1 ? '' : rows}`, type: time ? 'date' : 'linear', ...(time ? {} : { tickformat: ',d' }) });
    const data = [];
    names.forEach((name, row) => {
      const top = 1 - row * (height + gap);
      const has = list.filter((step) => Number.isFinite(number(step.metrics[name] ?? null)));
      layout[`yaxis${row ? row + 1 : ''}`] = axis({ domain: [top - height, top], nticks: 4 });
      layout.annotations.push({ text: plain(short(name, 60)), x: 0.005, xref: 'paper', y: top, yref: 'paper', xanchor: 'left', yanchor: 'bottom', showarrow: false, font: { color: css('--text'), size: 12.5 } });
      const curve = curves.get(name);
      if (curve) {
        const finite = curve.points.filter(([, at, value]) => Number.isFinite(number(value)) && (!time || at));
        data.push({ type: 'scatter', mode: 'lines', x: finite.map(([step, at]) => (time ? new Date(at * 1000).toISOString() : step)), y: finite.map((point) => point[2]), yaxis: `y${row ? row + 1 : ''}`, line: { color: css('--c1'), width: 1.5 }, hoverinfo: 'text', hovertext: finite.map(([step, , value]) => `${plain(name)} ${digits(value)}<br>step ${whole(step)}, events`), showlegend: false });
      }
      if (has.length) data.push({ type: 'scatter', mode: curve ? 'markers' : 'lines+markers', x: has.map(at), y: has.map((step) => step.metrics[name]), yaxis: `y${row ? row + 1 : ''}`, line: { color: css('--c0'), width: 2 }, marker: { size: 6 }, hoverinfo: 'text', hovertext: has.map((step) => `${plain(name)} ${digits(step.metrics[name])}<br>step ${whole(step.step)}`), showlegend: false });
    });
    const sizes = `y${rows === 1 ? '' : rows}`;
    layout[`yaxis${rows === 1 ? '' : rows}`] = axis({ domain: [0, height], tickformat: '.3~s', ticksuffix: 'B', nticks: 4, rangemode: 'tozero' });
    layout.annotations.push({ text: 'size', x: 0.005, xref: 'paper', y: height, yref: 'paper', xanchor: 'left', yanchor: 'bottom', showarrow: false, font: { color: css('--text'), size: 12.5 } });
    const places = list.map((step) => (time ? step.created * 1000 : step.step));
    const extent = Math.max(...places) - Math.min(...places) || 1;
    const between = places.slice(1).map((place, k) => place - places[k]).filter((each) => each > 0);
    // Plotly's ticks may lie between whole steps.
    if (!time && list.length <= 12 && Math.min(...between, extent) > extent / 16) layout.xaxis.tickvals = list.map((step) => step.step);
    const width = Math.max(0.62 * Math.min(...between, extent / 6), extent * 0.006);
    const left = new Set(list);
    for (const [name, colour, belongs] of GROUPS) {
      const group = [...left].filter(belongs);
      group.forEach((step) => left.delete(step));
      if (!group.length) continue;
      data.push({ type: 'bar', name, x: group.map(at), y: group.map((step) => step.nbytes ?? 0), width, yaxis: sizes, marker: { color: css(colour) }, hoverinfo: 'text', textposition: 'none', hovertext: group.map((step) => `step ${whole(step.step)}, ${bytes(step.nbytes)}<br>${moment(step.created)} UTC<br>${plain(short(step.kept || step.state, 90))}`) });
    }
    for (const step of list.filter((each) => marks.includes(each.step))) {
      layout.shapes.push({ type: 'line', xref: 'x', yref: 'paper', x0: at(step), x1: at(step), y0: 0, y1: 1, layer: 'above', opacity: 0.7, line: { color: css('--accent'), width: 1.5, dash: 'dot' } });
    }
    $('timeline').style.height = `${130 + 112 * rows}px`;
    return { data, layout };
  }

  const radio = (text, value) => make('label', {}, make('input', { type: 'radio', name: 'axis', checked: time === value, onchange: () => { time = value; draw('timeline', build); } }), text);
  const boxes = metrics.length > 1 ? metrics.map((name) => make('label', { title: name }, make('input', { type: 'checkbox', checked: chosen.has(name), onchange: (event) => { chosen[event.target.checked ? 'add' : 'delete'](name); draw('timeline', build); } }), short(name, 40))) : [];
  const controls = make('div', { class: 'bar' }, timed.length > 1 ? [make('span', {}, 'Axis'), radio('step', false), radio('time', true)] : [], boxes.length ? folded(`Choose among ${boxes.length} metrics`, boxes.length <= 8, make('div', { class: 'bar' }, boxes)) : []);
  const here = (step) => (step === facts.checkpoint.step ? make('span', { class: 'tag here' }, 'described below') : marks.includes(step) ? make('span', { class: 'tag' }, 'compared') : '');
  const metric = (name) => ({ title: short(name, 40), right: true, value: (row) => number(row.metrics[name] ?? null), cell: (row) => (name in row.metrics ? digits(row.metrics[name]) : '') });
  const numbered = { title: 'step', right: true, value: (row) => row.step, cell: (row) => whole(row.step) };
  const isFew = others.length <= 3;
  const columns = [
    numbered,
    { title: 'saved (UTC)', right: true, value: (row) => row.created, cell: (row) => moment(row.created) },
    { title: 'size', right: true, value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
    ...saved.filter(isCompared).map(metric),
    ...(steps.some((step) => step.layout !== 't5x') ? [{ title: 'layout', value: (row) => row.layout, cell: (row) => row.layout }] : []),
    { title: 'kept because', class: 'why', value: (row) => row.kept, cell: (row) => [row.state === 'complete' ? null : make('span', { class: 'bad' }, row.state + ' '), row.kept, ' ', here(row.step)] },
    ...(isFew ? others.map(metric) : []),
    ...(steps.some((step) => step.custom_metadata) ? [{ title: 'custom_metadata', class: 'mono', cell: ({ custom_metadata: text }) => (text.length > 40 ? folded(`${text.slice(0, 40)}…`, false, text) : text) }] : []),
  ];
  const order = { sort: 0, descending: true, page: 50 };
  const list = table(columns, steps, { label: 'Steps of the run', ...order });
  const rest = isFew ? null : folded(`${others.length} metrics that the keep policy does not compare`, false, table([numbered, ...others.map(metric)], steps, { label: 'Other metrics', ...order }).node);
  const last = ({ points }) => points[points.length - 1];
  const sized = (title, choose) => ({ title, right: true, value: (row) => number(ofPoints(row, choose)), cell: (row) => digits(ofPoints(row, choose)) });
  const events = table([
    { title: 'curve', value: (row) => row.name, cell: (row) => broken(row.name) },
    { title: 'points', right: true, value: (row) => row.count, cell: (row) => whole(row.count) },
    { title: 'last step', right: true, value: (row) => last(row)[0], cell: (row) => whole(last(row)[0]) },
    { title: 'last value', right: true, value: (row) => number(last(row)[2]), cell: (row) => digits(last(row)[2]) },
    sized('smallest', Math.min), sized('largest', Math.max),
  ], facts.curves, { label: 'Curves of the event files', sort: 0, page: 50 });
  const caption = 'Dotted lines: the steps described and compared below. Drag to zoom, double-click to reset. The table has the same values.';
  return {
    node: make('section', { id: 'run', 'aria-labelledby': 'run-title' }, make('h2', { id: 'run-title' }, 'Run'),
      make('p', { class: 'dim' }, `${counted(steps.length, 'step')} in the directory. Steps that the keep policy deleted are gone, with their metrics.`),
      make('div', { class: 'panel' }, controls, figure('timeline', `Metrics and sizes of ${counted(steps.length, 'step')}; the table below has the values`, caption, 300)),
      make('div', { class: 'panel' }, list.node, rest),
      facts.curves.length ? make('div', { class: 'panel', id: 'events' }, make('p', { class: 'dim' }, 'Curves of the event files of TensorBoard in the run. A curve has at most 1,000 points; the dots are the metrics that were saved with the steps.'), events.node) : []),
    start: () => draw('timeline', build),
  };
}

// --- leaves -----------------------------------------------------------------------------------------------------------

// Groups of {key, id, children, bytes, leaves}, and leaves of {key, id, leaf, bytes} in them; weights before the optimizer's state.
function grown(leaves) {
  let next = 0;
  const group = (key) => ({ key, id: `n${next++}`, groups: new Map(), children: [], bytes: 0, leaves: 0 });
  const root = group('');
  for (const leaf of leaves) {
    const above = [root];
    for (const key of leaf.path.slice(0, -1)) {
      const node = above[above.length - 1];
      if (!node.groups.has(key)) { node.groups.set(key, group(key)); node.children.push(node.groups.get(key)); }
      above.push(node.groups.get(key));
    }
    above[above.length - 1].children.push({ key: leaf.path[leaf.path.length - 1] ?? '', id: `n${next++}`, leaf, bytes: leaf.nbytes });
    for (const node of above) { node.bytes += leaf.nbytes; node.leaves += 1; }
  }
  const order = (item) => {
    const first = (child) => item === root && WEIGHTS.test(child.key);
    item.children?.sort((a, b) => first(b) - first(a) || natural(a.key, b.key)).forEach(order);
  };
  order(root);
  return root;
}

// A tree of <details>. The rows of a group are made when it is opened.
function treeView(onLeaf) {
  const node = make('div', { class: 'tree panel', role: 'group', 'aria-label': 'Leaves' });
  let [total, on] = [1, null];
  const described = ({ leaf, leaves }) => (!leaf ? counted(leaves, 'leaf', 'leaves') : leaf.dtype ? `${leaf.dtype} ${shape(leaf.shape)}` : leaf.value ? short(leaf.value, 24) : leaf.kind);
  const mark = (row) => { on?.removeAttribute('aria-current'); on = row; row.setAttribute('aria-current', 'true'); };

  function place(item, level) {
    const row = make(item.leaf ? 'button' : 'summary', { class: 'row', type: item.leaf && 'button', style: { '--level': String(level) }, onclick: () => { mark(row); if (item.leaf) onLeaf(item.leaf); } },
      make('span', { class: 'name' }, item.key || '(no name)'), make('span', { class: 'what' }, described(item)), make('span', { class: 'num' }, bytes(item.bytes)),
      make('span', { class: 'share', 'aria-hidden': 'true' }, make('i', { style: { width: `${(100 * item.bytes) / total}%` } })));
    if (item.leaf) return Object.assign(row, { item });
    const group = make('details', { ontoggle: () => group.open && group.grow() }, row);
    const grow = () => { if (group.children.length === 1) group.append(...item.children.map((child) => place(child, level + 1))); group.open = true; return [...group.children].slice(1); };
    return Object.assign(group, { item, grow });
  }
  function show(root, openAll) {
    total = Math.max(1, root.bytes);
    node.replaceChildren(...root.children.map((child) => place(child, 0)));
    if (!root.children.length) node.append(make('p', { class: 'dim' }, 'No leaf matches.'));
    const open = (places, level) => places.forEach((each) => each.grow && (openAll || level < 1) && open(each.grow(), level + 1));
    open([...node.children], 0);
  }
  function select(leaf) {
    let places = [...node.children];
    for (const key of leaf.path.slice(0, -1)) places = places.find((each) => each.grow && each.item.key === key)?.grow() ?? [];
    const row = places.find((each) => each.item?.leaf === leaf);
    if (!row) return;
    mark(row);
    node.scrollTop = row.offsetTop - node.offsetTop - 60;
  }
  return { node, show, select };
}

// White text is legible on these and on Plotly's darker shades of them, in both themes.
const DEEP = ['#2a6fb0', '#00796b', '#a85d00', '#7d3fb5', '#ad3559', '#4d6d17'];

// The largest leaves as areas; Plotly is slow with more.
function areas(root, leaves, onLeaf) {
  const shown = new Set([...leaves].sort((a, b) => b.nbytes - a.nbytes).slice(0, 500));
  const boxes = [];
  const add = (item, parent) => {
    if (!item.bytes || (item.leaf && !shown.has(item.leaf))) return;
    boxes.push({ item, parent });
    item.children?.forEach((child) => add(child, item.id));
  };
  add(root, '');
  const label = (item) => plain(short(item === root ? 'all leaves' : item.key, 60));
  const about = ({ leaf, leaves: count }) => (leaf ? `${plain(short(leaf.name, 90))}<br>${plain(leaf.dtype)} ${shape(leaf.shape)}` : counted(count, 'leaf', 'leaves'));
  const each = (value) => boxes.map(({ item }) => value(item));
  return () => ({
    data: [{ type: 'treemap', ids: each((item) => item.id), labels: each(label), parents: boxes.map(({ parent }) => parent), values: each((item) => item.bytes), text: each((item) => bytes(item.bytes)), branchvalues: 'total', textinfo: 'label+text', hoverinfo: 'text', hovertext: each((item) => `${item.leaf ? '' : `${label(item)}<br>`}${about(item)}<br>${bytes(item.bytes)}`), tiling: { pad: 1 }, maxdepth: 5, marker: { line: { width: 1, color: css('--panel') }, pad: { t: 20, l: 3, r: 3, b: 3 }, cornerradius: 3 }, root: { color: '#5b6675' }, textfont: { color: '#fff' }, pathbar: { thickness: 22 } }],
    layout: { margin: { l: 0, r: 0, t: 26, b: 0 }, treemapcolorway: DEEP, uniformtext: { minsize: 9, mode: 'hide' } },
    click: ['plotly_treemapclick', (event) => { const item = boxes.find((box) => box.item.id === event.points[0].id)?.item; if (item?.leaf) onLeaf(item.leaf); }],
  });
}

const WEIGHTS = /^(target|params|model)$/;

function leafSection(facts) {
  const { leaves, all_leaves: all, step } = facts.checkpoint;
  const root = grown(leaves);
  // In the order of the tree.
  const arrays = leaves.filter((leaf) => leaf.stats).sort((a, b) => WEIGHTS.test(b.path[0]) - WEIGHTS.test(a.path[0]) || natural(a.name, b.name));
  const sampled = arrays.filter((leaf) => leaf.stats.read < leaf.size);
  const details = make('div', { class: 'panel', 'aria-live': 'polite' }, make('p', { class: 'dim' }, 'Choose a leaf in the tree, the picture or the table.'));
  const title = step === null ? 'Leaves' : `Step ${whole(step)}`;

  function describe(leaf) {
    const stats = leaf.stats;
    const rows = [['dtype', leaf.dtype || leaf.kind], ['shape', leaf.dtype ? shape(leaf.shape) : ''], ['values', leaf.size ? whole(leaf.size) : ''], ['size', leaf.dtype ? bytes(leaf.nbytes) : ''], ['on disk', leaf.location], ['value', leaf.value]];
    if (stats) {
      const part = stats.read < leaf.size ? ` in a sample of ${whole(stats.read)} values` : '';
      rows.push(['mean ± std', `${digits(stats.mean)} ± ${digits(stats.std)}`], ['range', `${digits(stats.min)} to ${digits(stats.max)}${part}`], [part ? 'norm, estimated' : 'norm', digits(stats.norm)], ['zeros', `${digits((100 * stats.zeros) / stats.read)} %`]);
      if (stats.nan || stats.inf) rows.push(['NaN, infinite', make('span', { class: 'bad' }, `${whole(stats.nan)}, ${whole(stats.inf)}${part}`)]);
    }
    const list = make('dl', { class: 'facts' }, rows.filter(([, value]) => value !== '').map(([name, value]) => [make('dt', {}, name), make('dd', {}, value)]));
    details.replaceChildren(make('h3', { class: 'name' }, broken(leaf.name)), list);
    figures.delete('leaf-plot');
    if (stats?.counts) {
      details.lastElementChild.after(figure('leaf-plot', `Histogram of ${leaf.name} from ${digits(stats.low)} to ${digits(stats.high)}`, `Values of the leaf in ${stats.counts.length} bins; the counts have a logarithmic axis.`, 170));
      const [low, high] = [number(stats.low), number(stats.high)];
      const width = high / stats.counts.length - low / stats.counts.length;
      draw('leaf-plot', () => ({ data: [{ type: 'bar', x: stats.counts.map((_, at) => low + (at + 0.5) * width), y: stats.counts, width, marker: { color: css('--c0') }, hoverinfo: 'text', textposition: 'none', hovertext: stats.counts.map((count, at) => `${digits(low + at * width)} to ${digits(low + (at + 1) * width)}<br>${counted(count, 'value')}`) }], layout: { bargap: 0, margin: { l: 52, r: 8, t: 6, b: 28 }, xaxis: axis({ nticks: 7 }), yaxis: axis({ type: 'log', dtick: 1, exponentformat: 'SI' }) } }));
    }
  }
  const tree = treeView(describe);
  const choose = (leaf) => { tree.select(leaf); describe(leaf); };
  const stat = (title, field) => ({ title, right: true, value: (leaf) => number(leaf.stats[field]), cell: (leaf) => digits(leaf.stats[field]) });
  const rows = leafTable([
    { title: 'leaf', class: 'name', value: (leaf) => leaf.name, cell: (leaf) => make('button', { type: 'button', class: 'link', onclick: () => choose(leaf) }, broken(leaf.name)) },
    { title: 'dtype', value: (leaf) => leaf.dtype, cell: (leaf) => leaf.dtype },
    { title: 'shape', right: true, value: (leaf) => leaf.size, cell: (leaf) => shape(leaf.shape) },
    { title: 'histogram', cell: (leaf) => (leaf.stats.counts ? hist(leaf.stats) : '') },
    stat('mean', 'mean'), stat('std', 'std'), stat('min', 'min'), stat('max', 'max'), stat('norm', 'norm'),
    { title: 'zeros', right: true, value: (leaf) => leaf.stats.zeros / leaf.stats.read, cell: (leaf) => `${digits(Number(((100 * leaf.stats.zeros) / leaf.stats.read).toPrecision(3)))} %` },
    { title: 'NaN', right: true, value: (leaf) => leaf.stats.nan, cell: (leaf) => make('span', { class: leaf.stats.nan ? 'bad' : '' }, whole(leaf.stats.nan)) },
    { title: 'inf', right: true, value: (leaf) => leaf.stats.inf, cell: (leaf) => make('span', { class: leaf.stats.inf ? 'bad' : '' }, whole(leaf.stats.inf)) },
  ], arrays, { label: 'Statistics of the arrays', page: 60 });

  const status = make('span', { class: 'dim', role: 'status' });
  const box = make('input', { type: 'search', id: 'search', placeholder: 'Search: layers_0 kernel, float32, 512 × 2,048', 'aria-label': 'Search the leaves by name, dtype or shape', autocomplete: 'off', spellcheck: 'false' });
  const texts = new Map(leaves.map((leaf) => [leaf, `${leaf.name} ${leaf.dtype} ${shape(leaf.shape)} ${leaf.shape.join('x')}`.toLowerCase()]));
  function search() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = words.length ? leaves.filter((leaf) => words.every((word) => texts.get(leaf).includes(word))) : leaves;
    tree.show(words.length ? grown(matches) : root, matches.length <= (words.length ? 400 : 40));
    status.textContent = words.length ? `${whole(matches.length)} of ${counted(leaves.length, 'leaf', 'leaves')}` : all > leaves.length ? `the largest ${whole(leaves.length)} of ${whole(all)} leaves` : counted(all, 'leaf', 'leaves');
  }
  let wait;
  box.addEventListener('input', () => { clearTimeout(wait); wait = setTimeout(search, 120); });
  document.addEventListener('keydown', (event) => { if (event.key === '/' && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); box.focus(); } });
  search();

  const bad = arrays.filter((leaf) => leaf.stats.nan || leaf.stats.inf);
  const where = sampled.length ? ' in the sample' : '';
  const health = bad.length
    ? make('p', { class: 'note warn' }, make('b', {}, `${counted(bad.length, 'leaf has', 'leaves have')} NaN or infinite values${where}: `), bad.slice(0, 8).map((leaf) => leaf.name).join(', '), bad.length > 8 ? ` and ${bad.length - 8} more` : '')
    : make('p', { class: 'note' }, `No NaN and no infinite value${where}.`);
  const read = sampled.length
    ? `${counted(sampled.length, 'leaf', 'leaves')} of ${whole(arrays.length)} were sampled: their statistics come from evenly spread parts, ${bytes(facts.checkpoint.sample_bytes)} of ${bytes(facts.checkpoint.nbytes)} in all. Their extremes and counts are those of the sample.`
    : 'All values were read.';
  return {
    node: make('div', {},
      make('section', { id: 'leaves', 'aria-labelledby': 'leaves-title' }, make('h2', { id: 'leaves-title' }, title),
        make('p', { class: 'dim' }, 'Press / to search.'),
        make('div', { class: 'search' }, box, status),
        make('div', { class: 'columns' }, tree.node, make('div', {}, make('div', { class: 'panel' }, figure('areas', 'Bytes of the leaves as areas; the tree has the same values', 'Areas are bytes. Click a group to enter it, and its name above to go back.', 330)), details)),
        make('p', { class: 'dim' }, 'T5X\'s format records no shardings. The chunks of an array divide the shards that the devices wrote.')),
      make('section', { id: 'statistics', 'aria-labelledby': 'statistics-title' }, make('h2', { id: 'statistics-title' }, 'Statistics'), make('p', { class: 'dim' }, read), health, rows)),
    start: () => {
      draw('areas', areas(root, leaves, choose));
      const first = arrays.filter((leaf) => WEIGHTS.test(leaf.path[0]) === WEIGHTS.test(arrays[0].path[0]));
      if (first.length) describe(first.reduce((a, b) => (b.nbytes > a.nbytes ? b : a)));
    },
  };
}

// --- changes ----------------------------------------------------------------------------------------------------------

function changeSection(facts) {
  const { steps: [before, after], leaves: changed, same, heat } = facts.changes;
  const parts = [...new Set(heat.map((cell) => cell.part))];
  const weight = (part) => facts.checkpoint.leaves.filter((leaf) => leaf.path[0] === part).reduce((all, leaf) => all + leaf.nbytes, 0);
  let part = parts.find((name) => WEIGHTS.test(name)) ?? [...parts].sort((a, b) => weight(b) - weight(a))[0];
  const [MOST_ROWS, MOST_COLUMNS] = [80, 60];
  const cut = make('p', { class: 'dim' });
  const relative = (cell) => number(cell.relative);

  function build() {
    const list = heat.filter((cell) => cell.part === part);
    // Layers that move most stay, where there is not room for all.
    const strongest = (at) => { const best = new Map(); list.forEach((cell) => best.set(cell[at], Math.max(best.get(cell[at]) ?? -1, relative(cell) || 0))); return best; };
    const kept = (best, most) => [...best.keys()].sort((a, b) => best.get(b) - best.get(a)).slice(0, most).sort(natural);
    const [byRow, byColumn] = [strongest('layer'), strongest('parameter')];
    const [rows, columns] = [kept(byRow, MOST_ROWS), kept(byColumn, MOST_COLUMNS)];
    cut.textContent = rows.length < byRow.size || columns.length < byColumn.size ? `Shown are the ${rows.length} of ${whole(byRow.size)} layers and ${columns.length} of ${whole(byColumn.size)} parameters that changed most.` : '';
    const [rowAt, columnAt] = [new Map(rows.map((name, at) => [name, at])), new Map(columns.map((name, at) => [name, at]))];
    const empty = (value) => rows.map(() => columns.map(() => value));
    const [z, still, text] = [empty(null), empty(null), empty('')];
    let [low, high] = [Infinity, -Infinity];
    for (const cell of list) {
      const [row, column] = [rowAt.get(cell.layer), columnAt.get(cell.parameter)];
      if (row === undefined || column === undefined) continue;
      const value = relative(cell);
      if (value > 0) { const log = Math.min(Math.log10(value), 4); z[row][column] = log; low = Math.min(low, log); high = Math.max(high, log); } else still[row][column] = 0;
      text[row][column] = `${plain(short(cell.name, 90))}<br>${!cell.what ? 'unchanged' : Number.isNaN(value) ? `not compared: ${plain(cell.a)} → ${plain(cell.b)}` : `‖b − a‖ / ‖a‖ = ${digits(value)}<br>largest |b − a| = ${digits(cell.largest)}`}`;
    }
    if (!(high > low)) { low = (Number.isFinite(low) ? low : -3) - 1; high = low + 2; }
    const marks = [0, 1, 2, 3, 4].map((at) => low + (at * (high - low)) / 4);
    // With so many digits that the numbers at the color bar differ.
    const labels = (size) => marks.map((at) => digits(Number((10 ** at).toPrecision(size))));
    const size = [2, 3, 4].find((each) => new Set(labels(each)).size === marks.length) ?? 5;
    const names = (list, most) => list.map((name) => plain(short(name || '(leaf)', most)));
    // The part is chosen above.
    const titles = rows.map((name) => (name.startsWith(`${part}/`) ? name.slice(part.length + 1) : name));
    $('heat').style.height = `${Math.max(rows.length * 22, 60) + 200}px`;
    const common = { type: 'heatmap', x: columns.map((_, at) => at), y: rows.map((_, at) => at), xgap: 2, ygap: 2, hoverinfo: 'text', hovertext: text };
    return {
      data: [{ ...common, z: still, showscale: false, colorscale: [[0, css('--line')], [1, css('--line')]] }, { ...common, z, zmin: low, zmax: high, colorscale: 'Viridis', colorbar: { thickness: 12, outlinewidth: 0, tickvals: marks, ticktext: labels(size), tickfont: { color: css('--dim') } } }],
      layout: { margin: { l: 24, r: 10, t: 8, b: 20 }, xaxis: axis({ tickvals: columns.map((_, at) => at), ticktext: names(columns, 40), tickangle: 40, showgrid: false, zeroline: false, fixedrange: true }), yaxis: axis({ tickvals: rows.map((_, at) => at), ticktext: names(titles, 40), autorange: 'reversed', showgrid: false, zeroline: false, fixedrange: true }) },
    };
  }
  const select = make('select', { onchange: (event) => { part = event.target.value; draw('heat', build); } }, parts.map((name) => make('option', { value: name, selected: name === part }, name)));
  const counts = new Map();
  changed.forEach((leaf) => counts.set(leaf.what, (counts.get(leaf.what) ?? 0) + 1));
  const words = { values: 'have other values', dtype: 'have another dtype', shape: 'have another shape', kind: 'are of another kind', added: 'are new', removed: 'are gone' };
  const summary = [...counts].map(([what, count]) => `${whole(count)} ${words[what]}`).join(', ') || 'none differs';
  const sampled = facts.checkpoint.leaves.some((leaf) => leaf.stats && leaf.stats.read < leaf.size);
  const most = Math.max(...changed.map((leaf) => { const value = number(leaf.relative); return Number.isFinite(value) ? value : 0; }), Number.MIN_VALUE);
  const list = leafTable([
    { title: 'leaf', class: 'name', value: (row) => row.name, cell: (row) => broken(row.name) },
    { title: 'what', value: (row) => row.what, cell: (row) => row.what },
    { title: '‖b − a‖ / ‖a‖', right: true, value: (row) => number(row.relative), cell: (row) => digits(row.relative) },
    { title: '', cell: (row) => (row.relative === null ? '' : make('span', { class: 'meter', 'aria-hidden': 'true' }, make('i', { style: { width: `${Math.min(100, (100 * number(row.relative)) / most)}%` } }))) },
    { title: 'largest |b − a|', right: true, value: (row) => number(row.largest), cell: (row) => digits(row.largest) },
    { title: `step ${whole(before)}`, cell: (row) => make('span', { class: 'mono' }, row.a) },
    { title: `step ${whole(after)}`, cell: (row) => make('span', { class: row.a === row.b ? 'dim' : 'mono' }, row.a === row.b ? 'same' : row.b) },
  ], changed, { label: 'Leaves that differ', sort: 2, descending: true, page: 40 });
  return {
    node: make('section', { id: 'changes', 'aria-labelledby': 'changes-title' }, make('h2', { id: 'changes-title' }, `Changes from step ${whole(before)} to ${whole(after)}`),
      make('p', { class: 'dim' }, `Of ${counted(changed.length + same, 'leaf', 'leaves')}, ${summary}, ${whole(same)} ${sampled ? 'agree in the values that were read' : 'are equal in every bit'}.${sampled ? ' Large leaves were sampled.' : ''}`),
      parts.length ? make('div', { class: 'panel' }, make('div', { class: 'bar' }, make('label', {}, 'Part', select)), figure('heat', 'Relative change of each parameter of each layer; the table below has the values', 'The norm of the change over the norm before, by layer and parameter. Grey: unchanged, or not compared.', 320), cut) : null,
      changed.length ? list : null),
    start: () => parts.length && draw('heat', build),
  };
}

// --- the page ---------------------------------------------------------------------------------------------------------

function cards(facts) {
  const { steps, checkpoint } = facts;
  const rows = [];
  if (steps.length) {
    const complete = steps.filter((step) => step.state === 'complete');
    const latest = complete[complete.length - 1];
    rows.push(['Steps', whole(complete.length), latest ? `latest ${whole(latest.step)}` : ''], ['All steps on disk', bytes(steps.reduce((all, step) => all + (step.nbytes ?? 0), 0)), '']);
    if (latest) rows.push(['Last saved', moment(latest.created).slice(0, 10), latest.created === null ? '' : `${moment(latest.created).slice(11)} UTC`]);
  }
  rows.push([checkpoint.step === null ? 'Arrays in memory' : `Arrays of step ${whole(checkpoint.step)}`, bytes(checkpoint.nbytes), ''], ['Leaves', whole(checkpoint.all_leaves), ''], ['Values', checkpoint.size >= 1e6 ? `${(checkpoint.size / 1e6).toLocaleString('en-US', { maximumFractionDigits: 1 })} M` : whole(checkpoint.size), checkpoint.size >= 1e6 ? whole(checkpoint.size) : '']);
  return make('dl', { class: 'cards' }, rows.map(([name, value, small]) => make('div', {}, make('dt', {}, name), make('dd', {}, value, small ? make('small', {}, small) : null))));
}

async function unpacked(id) {
  const data = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
}

async function main() {
  const facts = JSON.parse(await unpacked('facts'));
  $('name').textContent = facts.name;
  $('path').textContent = facts.path;
  const sections = [facts.steps.length ? runSection(facts) : null, leafSection(facts), facts.changes ? changeSection(facts) : null].filter(Boolean);
  $('main').replaceChildren(cards(facts), ...sections.map((section) => section.node));
  const links = [['run', 'Run'], ['leaves', facts.checkpoint.step === null ? 'Leaves' : `Step ${whole(facts.checkpoint.step)}`], ['statistics', 'Statistics'], ['changes', 'Changes']];
  $('nav').append(...links.filter(([id]) => $(id)).map(([id, text]) => make('a', { href: `#${id}` }, text)));
  $('footer').append(`Made by t5ckpt ${facts.version} on ${facts.made}. The page requests nothing from any host. Pictures: plotly.js, MIT license.`);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  const code = document.createElement('script');
  code.textContent = await unpacked('plotly');
  document.head.append(code);
  sections.forEach((section) => section.start());
  redraw();
  document.documentElement.dataset.ready = 'true';
}

main().catch((error) => { $('loading')?.replaceChildren(`The page cannot be shown: ${error}. It needs a browser made since 2023.`); document.documentElement.dataset.failed = String(error); });
