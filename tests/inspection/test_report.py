"""The report: what the page shows in a real browser, whatever the names are, and how much of a checkpoint it reads."""

import json
import math
import pathlib
import subprocess
import sys

import flax.serialization
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorboardX
from support.chromium import chromium, need_chromium
from support.facts import put_facts

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, OutputExistsError
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.inspection.block_iteration import blocks_in, bytes_in
from t5ckpt.inspection.layers import layers_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.report.facts import largest, leaf_facts
from t5ckpt.inspection.stats import leaf_stats

READY = 'document.documentElement?.dataset.ready || document.documentElement?.dataset.failed'
HOSTILE = [
    '<img src=http://evil.test/leaf onerror="window.hacked=1">',
    '</script><script>window.hacked=2</script>',
    '"><svg onload=window.hacked=3>',
    '<b>bold</b>%{x}&lt;&amp;',
    '<a href="javascript:window.hacked=4">a link</a>',
    "${window.hacked=5}`'\\",
    '\u202e\x1b[31m\u2028reversed',
]


def state_of(step, names=()):
    rng = np.random.default_rng(0)
    layer = {'kernel': rng.standard_normal((48, 64)).astype(np.float32), 'bias': np.zeros(3, np.float32)}
    layers = {f'layers_{i}': {name: value * (1 + i * step) for name, value in layer.items()} for i in range(3)}
    return {
        'target': {**layers, **{name: {'scale': np.arange(8, dtype=np.float32)} for name in names}},
        'step': np.int32(step),
        'note': HOSTILE[0],
    }


def saved(run, steps=(100, 200, 300), names=(), metrics=('eval/loss',)):
    keep = t5ckpt.KeepLatest(5) | t5ckpt.KeepBest(2, metrics[0], 'min')
    with t5ckpt.Checkpointer(state_of(0, names), checkpoints_dir=run, keep_policy=keep) as checkpointer:
        for step in steps:
            given = {name: 100 / step + at for at, name in enumerate(metrics)}
            checkpointer.save(state_of(step, names), step=step, metrics=given)
    return t5ckpt.open_run(run)


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    need_chromium()
    with chromium(tmp_path_factory.mktemp('chromium')) as page:
        page.size(1280, 900)
        yield page


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp('report')
    return saved(directory / 'run').report(directory / 'run.html')


@pytest.fixture
def page(browser, report, tmp_path):
    browser.theme('light')
    browser.open(tmp_path.__class__(report), READY)
    assert browser.run('document.documentElement.dataset.failed') is None
    return browser


def text_of(page, selector):
    return page.run(f'document.querySelector({json.dumps(selector)})?.textContent')


# --- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_are_text_and_nothing_is_requested(browser, tmp_path):
    run = tmp_path / HOSTILE[0].replace('/', '|')
    saved(run, names=HOSTILE, metrics=(HOSTILE[4], *HOSTILE)).report(tmp_path / 'page.html')
    browser.open(tmp_path / 'page.html', READY)
    shown = browser.run('document.querySelector("#main").innerText')
    browser.run('document.querySelectorAll(".tree .row").forEach((row) => row.click())')
    assert browser.run('document.documentElement.dataset.failed') is None
    assert browser.run('document.querySelector("h1").textContent') == f'{tmp_path.name}/{run.name}'
    assert browser.run('document.title').startswith(f'{tmp_path.name}/{run.name}')
    for name in HOSTILE[:6]:
        escaped = name.replace('/', '\\/') if '\\' not in name else name.replace('\\', '\\\\')
        assert escaped in shown, name
    assert '\\u202e\\x1b[31m\\u2028reversed' in shown
    # Also in the pictures, whose library reads some HTML in its texts.
    drawn = browser.run('[...document.querySelectorAll("svg text")].map((text) => text.textContent).join("\\n")')
    assert '<b>bold<\\/b>%{x}&lt;&amp;' in drawn
    assert HOSTILE[4] in drawn
    assert browser.run('document.querySelectorAll("svg a").length') == 0
    browser.run('new Promise((done) => setTimeout(done, 300))')
    assert browser.run('window.hacked') is None
    assert {url.partition(':')[0] for url in browser.requests} <= {'file', 'data', 'blob'}
    assert browser.console == []


@pytest.mark.slow
def test_the_policy_of_the_page_stops_what_would_be_injected_all_the_same(page):
    page.run('document.body.insertAdjacentHTML("beforeend", "<img src=https://evil.test/x onerror=window.hacked=1>")')
    page.run('document.head.append(Object.assign(document.createElement("script"), {textContent: "window.hacked=2"}))')
    page.run('new Promise((done) => setTimeout(done, 300))')
    assert page.run('window.hacked') is None
    assert len([line for line in page.console if 'Content Security Policy' in line]) == 3
    page.console.clear()


def test_the_run_its_steps_and_their_metrics(page):
    rows = page.run('[...document.querySelectorAll("#run tbody tr")].map((row) => row.innerText)')
    assert [row.split('\t')[0].strip() for row in rows] == ['300', '200', '100']
    assert 'one of the latest 5; latest' in rows[0]
    assert 'eval/loss 0.5, among the best 2' in rows[1]
    assert 'described below' in rows[0]
    assert 'compared' in rows[1]
    curves = page.run(
        'document.querySelector("#timeline").data.map((trace) => [trace.type, [...trace.x], [...trace.y]])'
    )
    assert curves[0] == ['scatter', [100, 200, 300], [1.0, 0.5, 1 / 3]]
    assert curves[1][:2] == ['bar', [100, 200, 300]]
    assert min(curves[1][2]) > 3 * 48 * 64 * 4
    assert page.run('document.querySelector("#timeline").layout.xaxis.tickvals') == [100, 200, 300]
    page.run('document.querySelectorAll("input[name=axis]")[1].click()')
    assert page.run('document.querySelector("#timeline").layout.xaxis.type') == 'date'


@pytest.mark.slow
def test_curves_of_event_files_are_drawn_beside_saved_metrics(browser, tmp_path):
    run = saved(tmp_path / 'run')
    for directory, tag in (('eval', 'loss'), ('train', 'loss'), ('<b>bold<i>', 'loss')):
        with tensorboardX.SummaryWriter(str(tmp_path / 'run' / directory)) as writer:
            for step in range(10, 310, 10):
                writer.add_scalar(tag, 100 / step, step, walltime=1.7e9 + step)
    browser.open(pathlib.Path(run.report(tmp_path / 'run.html')), READY)
    assert browser.run('document.documentElement.dataset.failed') is None
    assert browser.run('window.hacked') is None
    traces = json.loads(
        browser.run(
            'JSON.stringify(document.getElementById("timeline").data.filter((each) => each.type === "scatter")'
            '.map((each) => [each.yaxis, each.mode, each.x.length]))'
        )
    )
    # By default all three; eval/loss has both, on one axis.
    assert traces[:2] == [['y', 'lines', 30], ['y', 'markers', 3]]
    assert sorted(traces[2:]) == [['y2', 'lines', 30], ['y3', 'lines', 30]]
    rows = browser.run('[...document.querySelectorAll("#events tbody tr")].map((row) => row.innerText).join("|")')
    assert 'train/loss' in rows
    assert '300' in rows
    browser.run('document.querySelectorAll("input[name=axis]")[1].click()')
    assert browser.run('document.getElementById("timeline").data.filter((each) => each.mode === "lines").length') == 3


@pytest.mark.slow
def test_a_step_without_a_policy_says_that_none_is_recorded(browser, tmp_path):
    for step in (1, 2):
        (tmp_path / 'flax').mkdir(exist_ok=True)
        (tmp_path / f'flax/checkpoint_{step}').write_bytes(flax.serialization.to_bytes({'w': np.ones(3)}))
        t5ckpt.convert_checkpoint('flax', tmp_path / f'flax/checkpoint_{step}', tmp_path / 'run')
    browser.open(pathlib.Path(t5ckpt.open_run(tmp_path / 'run').report(tmp_path / 'run.html')), READY)
    reasons = browser.run(
        '[...document.querySelectorAll("#run td.why")].map((cell) => cell.innerText.trim()).join("|")'
    )
    assert reasons == 'latest described below|no keep policy is recorded compared'


def test_100_gb_cost_what_is_sampled(tmp_path):
    rows, columns, chunk = 16384, 65536, 256
    step = tmp_path / 'run/checkpoint_100'
    metadata = {'shape': [rows, columns], 'chunks': [chunk, columns], 'compressor': None}
    zarr = {**metadata, 'dtype': '<f4', 'fill_value': None, 'filters': None, 'order': 'C', 'zarr_format': 2}
    layers = {}
    for at in range(25):
        name = f'target.layers_{at}.kernel'
        (step / name).mkdir(parents=True)
        (step / name / '.zarray').write_text(json.dumps(zarr))
        for number in range(rows // chunk):
            # A hole, which takes no space.
            with open(step / name / f'{number}.0', 'wb') as file:
                file.truncate(chunk * columns * 4)
        spec = {
            'driver': 'zarr',
            'dtype': 'float32',
            'kvstore': {'driver': 'file', 'path': f'{name}/'},
            'metadata': metadata,
        }
        layers[f'layers_{at}'] = {'kernel': spec}
    (step / 'checkpoint').write_bytes(encode_manifest({'target': layers}))
    read = []
    view = t5ckpt.open_checkpoint(tmp_path / 'run')
    assert view.nbytes == 25 * rows * columns * 4 > 100 * 10**9
    view.report(tmp_path / 'run.html', sample_bytes=8_000_000, progress=lambda done, total: read.append((done, total)))
    # Twice, for statistics and histograms.
    assert read[-1][0] == read[-1][1] < 3 * 8_000_000
    assert (tmp_path / 'run.html').stat().st_size < 3 * 10**6


@pytest.mark.slow
def test_the_tree_is_in_the_order_of_numbers(browser, tmp_path):
    layers = {f'layers_{at}': {'w': np.full(3, at, np.float32)} for at in range(12)}
    state = {'opt_state': {'mu': np.ones(3, np.float32)}, 'target': layers}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(state, step=1)
    t5ckpt.open_run(tmp_path / 'run').report(tmp_path / 'page.html')
    browser.open(tmp_path / 'page.html', READY)
    rows = browser.run('[...document.querySelectorAll(".tree .name")].map((name) => name.textContent)')
    assert rows[0] == 'target', 'weights first'
    assert [row for row in rows if row.startswith('layers')] == [f'layers_{at}' for at in range(12)]
    table = browser.run('[...document.querySelectorAll("#statistics td.name")].map((name) => name.textContent)')
    assert table == [*(f'target/layers_{at}/w' for at in range(12)), 'opt_state/mu']


def test_the_tree_by_keyboard(page):
    page.run('document.body.focus()')
    page.press('/')
    assert page.run('document.activeElement.id') == 'search'
    page.press('l', 'a', 'y', 'e', 'r', 's', '_', '1')
    page.wait('document.querySelector("[role=status]").textContent === "2 of 8 leaves"')
    focused = 'document.activeElement.querySelector(".name").textContent'
    page.press('Tab')
    assert page.run(focused) == 'target'
    page.press('Tab')
    assert page.run(focused) == 'layers_1'
    page.press('Enter')
    page.press('Tab')
    assert page.run('document.activeElement.className') != 'row', 'a closed group has no rows to reach'
    page.run('document.querySelectorAll(".tree summary")[1].focus()')
    page.press('Enter', 'Tab')
    assert page.run(focused) == 'bias'
    page.press('Tab', 'Enter')
    assert text_of(page, 'h3') == 'target/layers_1/kernel'
    assert page.run('document.activeElement.getAttribute("aria-current")') == 'true'
    assert page.run('document.querySelector("#leaf-plot").data[0].y.reduce((a, b) => a + b)') == 48 * 64
    sizes = '[...document.querySelectorAll("#leaf-plot .%stick text")].map((text) => getComputedStyle(text).fontSize)'
    assert set(page.run(sizes % 'x')) == set(page.run(sizes % 'y')), 'the labels of both axes have one size'


@pytest.mark.slow
def test_25_metrics_metadata_and_moments_leave_room_for_what_decides(browser, tmp_path):
    weights = {'dense': {'kernel': np.ones((4, 8), np.float32), 'bias': np.ones(8, np.float32)}}
    names = ['zz/accuracy', *(f'aux/{at:02}' for at in range(24))]
    keep = t5ckpt.KeepLatest(5) | t5ckpt.KeepBest(2, names[0], 'max')
    with t5ckpt.Checkpointer(None, checkpoints_dir=tmp_path / 'one/run', keep_policy=keep) as checkpointer:
        for step in (1, 2):
            made = {'params': weights, 'opt_state': {'0': {'mu': weights, 'nu': weights}}, 'step': np.int32(step)}
            state = {**made, 'params': {'dense': {**weights['dense'], 'bias': np.full(8, step, np.float32)}}}
            state['opt_state'] = {'0': {'mu': state['params'], 'nu': weights}}
            checkpointer.save(
                state,
                step=step,
                metrics={name: step + at for at, name in enumerate(names)},
                custom_metadata={'git': 'abc', 'config': {'layers': list(range(40)), 'name': '<b>a'}},
            )
    browser.open(pathlib.Path(t5ckpt.open_run(tmp_path / 'one/run').report(tmp_path / 'page.html')), READY)
    assert browser.run('document.querySelector("h1").textContent') == 'one/run'
    heads = '[...document.querySelectorAll("%s thead")].map((head) => head.innerText.trim().split(/\\s*\\t\\s*/))'
    shown, *_ = browser.run(heads % '#run')
    assert shown == ['step', 'saved (UTC)', 'size', 'zz/accuracy', 'kept because', 'custom_metadata']
    hidden = browser.run('document.querySelectorAll("#run details:not([open]) thead th").length')
    assert hidden == 25, 'the step and the other 24 metrics are folded'
    cell = browser.run('document.querySelector("#run td.mono").textContent')
    assert cell.startswith('{"config": {"layers": [0, 1, 2, 3, 4, 5,…{"config"')
    assert cell.endswith('39], "name": "<b>a"}, "git": "abc"}')
    drawn = browser.run('document.querySelector("#timeline").layout.annotations.map((each) => each.text)')
    assert drawn == ['zz/accuracy', 'aux/00', 'aux/01', 'aux/02', 'size']

    def rows(section, folded):
        place = f'#{section} details' if folded else f'#{section} div:not(details > div) > .scroll'
        return browser.run(f'[...document.querySelectorAll("{place} td.name")].map((cell) => cell.textContent)')

    def type_(section, text):
        box = f'document.querySelector("#{section} input[type=search]")'
        browser.run(f'{box}.value = "{text}"; {box}.dispatchEvent(new Event("input"))')

    for section, all_moments in (('statistics', 4), ('changes', 1)):
        assert not browser.run(f'document.querySelector("#{section} details").open')
        assert len(rows(section, folded=True)) == all_moments
        assert 'params/dense/bias' in rows(section, folded=False)
        type_(section, 'BIAS mu')
        assert rows(section, folded=False) == []
        assert rows(section, folded=True) == ['opt_state/0/mu/dense/bias']
        assert browser.run(f'document.querySelector("#{section} details").open'), 'the only leaf that matches'
        type_(section, 'no such leaf')
        assert rows(section, folded=True) == []
        type_(section, '')
        assert len(rows(section, folded=True)) == all_moments
    assert browser.console == []


@pytest.mark.slow
def test_everything_that_can_be_clicked_can_be_reached_and_has_a_name(page):
    page.run('document.activeElement.blur()')
    seen = set()
    named = 'ariaLabel || labels?.[0]?.innerText || innerText'
    for _ in range(60):
        page.press('Tab')
        seen.add(page.run(f'(({{ariaLabel, labels, innerText}}) => {named})(document.activeElement)'))
    assert {'Skip to the contents', 'Run', 'Changes', 'mean', 'target/layers_0/kernel', 'Steps of the run'} <= seen
    assert '' not in seen
    unnamed = '[...document.querySelectorAll("input, select")].filter((each) => !each.labels.length && !each.ariaLabel)'
    assert page.run(f'{unnamed}.length') == 0
    assert page.run('[...document.querySelectorAll("[role=img]")].filter((each) => !each.ariaLabel).length') == 0
    page.run('document.querySelectorAll("#statistics th button")[3].focus()')
    page.press('Enter')
    assert page.run('document.activeElement.closest("th").getAttribute("aria-sort")') == 'descending'


def test_the_statistics_are_those_of_the_library(page, report):
    stats = t5ckpt.open_checkpoint(f'{report.removesuffix(".html")}')['target'].stats()
    rows = page.run('[...document.querySelectorAll("#statistics tbody tr")].map((row) => row.innerText.split("\\t"))')
    kernel = next(row for row in rows if row[0].strip() == 'target/layers_2/kernel')
    assert math.isclose(float(kernel[8]), stats['layers_2/kernel'].norm, rel_tol=1e-4)
    assert 'No NaN and no infinite value.' in page.run('document.querySelector("#statistics").innerText')


def test_what_changed_as_a_heat_map(page):
    heat = page.run(
        '(() => { const {data, layout} = document.querySelector("#heat");'
        ' return [layout.xaxis.ticktext, layout.yaxis.ticktext, data[1].z, data[0].z]; })()'
    )
    assert heat[:2] == [['bias', 'kernel'], ['layers_0', 'layers_1', 'layers_2']]
    # layers_1 goes from 201 times the first values to 301 times, and layers_0 stays.
    assert heat[2][0] == [None, None]
    assert heat[3][0] == [0, 0]
    assert math.isclose(heat[2][1][1], math.log10(100 / 201), rel_tol=1e-4)
    assert math.isclose(heat[2][2][1], math.log10(200 / 401), rel_tol=1e-4)
    bar = page.run('document.querySelector("#heat").data[1].colorbar.ticktext')
    assert len(set(bar)) == len(bar) > 1, 'two marks of the color bar have one number'
    text = page.run('document.querySelector("#changes").innerText')
    assert (text.count('float32 (48, 64)'), text.count('same')) == (2, 3), 'dtype and shape are repeated'
    assert 'Changes from step 200 to 300' in text
    assert 'Of 8 leaves, 3 have other values, 5 are equal in every bit.' in text


@pytest.mark.slow
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_both_themes_can_be_read(page, theme):
    page.theme(theme)
    colours = 'getComputedStyle(document.body)'
    pixels = [
        page.run(f'{colours}.{name}.match(/\\d+/g).slice(0, 3).map(Number)') for name in ('color', 'backgroundColor')
    ]
    text, back = (sum(pixel) / 3 for pixel in pixels)
    assert (text < back) == (theme == 'light')
    assert abs(text - back) > 170
    wanted = 'getComputedStyle(document.documentElement).getPropertyValue("--text").trim()'
    page.wait(f'document.querySelector("#timeline").layout.font.color === {wanted}')


def test_a_narrow_window_scrolls_in_one_direction(page):
    page.size(480, 900)
    try:
        page.run('new Promise((done) => setTimeout(done, 500))')
        assert page.run('document.documentElement.scrollWidth') <= 480
    finally:
        page.size(1280, 900)


# --- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_checkpoint_is_sampled_and_the_page_says_so(browser, tmp_path):
    big = np.random.default_rng(0).standard_normal((2048, 1024)).astype(np.float32)
    big[0, 0] = np.nan
    state = {'target': {'big': big, 'other': big * 2, 'small': np.arange(64, dtype=np.float32)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as checkpointer:
        for step in (1, 2):
            checkpointer.save({'target': {**state['target'], 'big': big * step}}, step=step)
    asked = []
    t5ckpt.open_run(tmp_path / 'run').report(
        tmp_path / 'page.html', sample_bytes=2**21, progress=lambda done, total: asked.append((done, total))
    )
    # Twice for the statistics, once for the changes; 16 MB a step would be 50 MB.
    assert asked[-1][0] == asked[-1][1] <= 3 * 2**21
    browser.open(tmp_path / 'page.html', READY)
    text = browser.run('document.querySelector("#main").innerText')
    assert '2 leaves of 3 were sampled' in text
    assert '2.1 MB of 16.8 MB in all' in text
    assert 'agree in the values that were read' in text
    facts = browser.run('unpacked("facts")')
    leaves = {leaf['name']: leaf['stats'] for leaf in json.loads(facts)['checkpoint']['leaves']}
    assert leaves['target/small']['read'] == 64
    assert leaves['target/big']['read'] < big.size / 6
    assert math.isclose(leaves['target/other']['norm'], 2 * np.sqrt(np.nansum(big * big)), rel_tol=0.02)
    (changed,) = json.loads(facts)['changes']['leaves']
    assert (changed['name'], round(changed['relative'], 6)) == ('target/big', 1.0)


@hypothesis.given(
    sizes=st.lists(st.integers(0, 4000), max_size=6),
    columns=st.integers(1, 50),
    sample=st.integers(1, 200_000),
    codec=st.sampled_from(['none', 'zstd']),
)
def test_a_sample_has_distinct_blocks_of_every_leaf_and_about_the_bytes(sizes, columns, sample, codec):
    infos = [
        LeafInfo((f'l{at}',), 'stored', (size, columns), 'float32', size * columns * 4, (64, columns), codec)
        for at, size in enumerate(sizes)
    ]
    blocks = list(blocks_in(infos, sample))
    assert {block.leaf.name for block in blocks} == {info.name for info in infos if info.nbytes}
    assert len({(block.leaf.name, repr(block.index)) for block in blocks}) == len(blocks)
    assert bytes_in(infos, sample) == sum(block.nbytes for block in blocks)
    # Of a leaf at least a row, or a chunk.
    least = columns * 4 * (1 if codec == 'none' else 4000)
    assert bytes_in(infos, sample) <= max(sample, 0) + len(infos) * least
    assert bytes_in(infos) == sum(info.nbytes for info in infos)


def test_a_sample_sees_many_places_of_an_array(tmp_path):
    ramp = np.arange(2**22, dtype=np.float32).reshape(2**12, 2**10)
    with t5ckpt.Checkpointer({'a': ramp}, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save({'a': ramp}, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    (stats,) = leaf_stats(view, view.infos(), sample_bytes=2**22).values()
    assert stats.size == 2**20
    assert math.isclose(stats.mean, ramp.mean(), rel_tol=0.1)
    assert math.isclose(stats.std, ramp.std(), rel_tol=0.1)


def test_the_largest_leaves_are_listed_where_there_are_too_many():
    infos = [LeafInfo((f'l{at}',), 'inline', (at,), 'int8', at) for at in range(20_005)]
    assert [info.size for info in largest(infos)] == list(range(5, 20_005))


def test_a_leaf_of_no_finite_value(tmp_path):
    state = {
        'a': np.full(4, np.nan, np.float32),
        'b': np.zeros((0, 3), np.float32),
        'c': np.array([np.inf, 1], np.float32),
    }
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    facts = {leaf['name']: leaf['stats'] for leaf in leaf_facts(view.infos(), view.stats(bins=4))}
    assert facts['b'] is None
    assert (facts['a']['nan'], facts['a']['mean']) == (4, None)
    assert (facts['c']['inf'], facts['c']['max']) == (1, 1.0)
    json.dumps(facts, allow_nan=False)


# --- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_which_steps(tmp_path, browser):
    run = saved(tmp_path / 'run')

    def changes(**given):
        run.report(tmp_path / 'page.html', force=True, **given)
        browser.open(tmp_path / 'page.html', READY)
        facts = json.loads(browser.run('unpacked("facts")'))
        return facts['checkpoint']['step'], facts.get('changes', {}).get('steps')

    assert changes() == (300, [200, 300])
    assert changes(steps=200) == (200, [100, 200])
    assert changes(steps=[300, 100]) == (300, [100, 300])
    assert changes(steps=[100]) == (100, None)
    with pytest.raises(ValueError, match=r'steps: \[100, 200, 300\] are more than two'):
        run.report(tmp_path / 'other.html', steps=[100, 200, 300])
    with pytest.raises(CheckpointNotFoundError, match='step 7'):
        run.report(tmp_path / 'other.html', steps=7)
    with pytest.raises(ValueError, match='sample_bytes'):
        run.report(tmp_path / 'other.html', sample_bytes=0)
    with pytest.raises(OutputExistsError, match=r'page\.html exists'):
        run.report(tmp_path / 'page.html')
    assert not (tmp_path / 'other.html').exists()


@pytest.mark.slow
def test_a_step_that_cannot_be_read_is_shown_and_not_compared(tmp_path, browser):
    run = saved(tmp_path / 'run')
    put_facts(tmp_path / 'run' / 'checkpoint_200', b'{' * 40)
    run.report(tmp_path / 'page.html')
    browser.open(tmp_path / 'page.html', READY)
    assert 'Changes from step 100 to 300' in text_of(browser, '#changes')
    assert 'unreadable' in text_of(browser, '#run tbody')


def test_a_checkpoint_without_a_run(tmp_path, browser):
    saved(tmp_path / 'run')
    t5ckpt.convert_checkpoint('to-safetensors', tmp_path / 'run', tmp_path / 'weights.safetensors')
    t5ckpt.open_checkpoint(tmp_path / 'weights.safetensors').report(tmp_path / 'page.html')
    browser.open(tmp_path / 'page.html', READY)
    assert text_of(browser, '#run') is None
    assert text_of(browser, '#leaves h2') == 'Leaves'
    assert browser.console == []


def test_an_empty_run(tmp_path):
    (tmp_path / 'run').mkdir()
    with pytest.raises(CheckpointNotFoundError, match='no complete step'):
        t5ckpt.open_run(tmp_path / 'run').report(tmp_path / 'page.html')


def test_without_the_library_the_error_names_it(tmp_path):
    saved(tmp_path / 'run')
    code = (
        'import sys, t5ckpt; sys.modules["plotly"] = None\n'
        f'try: t5ckpt.open_run({str(tmp_path / "run")!r}).report({str(tmp_path / "x.html")!r})\n'
        'except t5ckpt.errors.MissingDependencyError as error: print(error)'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "a report needs plotly: pip install plotly, or pip install 't5ckpt[report]'"


# --- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'layer', 'parameter'),
    [
        ('target/decoder/layers_2/mlp/wi_1/kernel', 'target/decoder/layers_2', 'mlp/wi_1/kernel'),
        ('opt/0/mu/decoder/layers_2/mlp/wi_1/kernel', 'opt/0/mu/decoder/layers_2', 'mlp/wi_1/kernel'),
        ('target/decoder/norm/scale', 'target/decoder/norm', 'scale'),
        ('model/blocks/2/w', 'model/blocks/2', 'w'),
        ('step', '', 'step'),
        ('model/linear/weight/0', 'model/linear', 'weight/0'),
        ('model/layers_2/linear/weight/0', 'model/layers_2', 'linear/weight/0'),
        ('model/weight/0/mu', 'model/weight/0', 'mu'),
    ],
)
def test_layers(name, layer, parameter):
    names = [
        name.replace('_2', f'_{i}').replace('/2/', f'/{i}/').replace('wi_1', f'wi_{j}')
        for i in range(4)
        for j in (0, 1)
    ]
    assert layers_of(tuple(each.split('/')) for each in [*names, name])[tuple(name.split('/'))] == (layer, parameter)
