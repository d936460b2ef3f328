"""Headless Chromium, spoken to over a pipe in its DevTools protocol: keys, themes, screenshots, and every request of a page."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

PATIENCE = 60.0


def need_chromium():
    """Skips where there is none; CI has one, and fails."""
    if shutil.which('chromium') is None:
        if os.environ.get('CI') == 'true':
            pytest.fail('needs chromium, which CI installs')
        pytest.skip('needs chromium')


class Page:
    """One page."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._ids = itertools.count(1)
        self._rest = b''
        self.requests: list[str] = []
        self.console: list[str] = []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self._session = None
        self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Network', 'Runtime', 'Log'):
            self.call(f'{domain}.enable')

    def call(self, method, **params):
        """The result of a command."""
        number = next(self._ids)
        session = {'sessionId': self._session} if getattr(self, '_session', None) else {}
        os.write(
            self._write, json.dumps({'id': number, 'method': method, 'params': params, **session}).encode() + b'\0'
        )
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._message(deadline)
            if message.get('id') == number:
                assert 'error' not in message, message
                return message['result']

    def _message(self, deadline):
        while b'\0' not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, 'Chromium does not answer'
            self._rest += os.read(self._read, 2**20)
        text, _, self._rest = self._rest.partition(b'\0')
        message = json.loads(text)
        match message.get('method'):
            case 'Network.requestWillBeSent':
                self.requests.append(message['params']['request']['url'])
            case 'Runtime.exceptionThrown':
                self.console.append(json.dumps(message['params']['exceptionDetails']))
            case 'Log.entryAdded':
                self.console.append(message['params']['entry']['text'])
        return message

    def size(self, width, height):
        """Sets the size of the window."""
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, name):
        """What the system prefers: 'light' or 'dark'."""
        self.call('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': name}])

    def open(self, path: Path, ready: str):
        """Opens a file and waits until an expression is true."""
        self.requests.clear()
        self.call('Page.navigate', url=path.as_uri())
        self.wait(ready)

    def wait(self, expression):
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(expression):
            assert time.monotonic() < deadline, f'{expression}: not true; {self.console}'
            time.sleep(0.05)

    def run(self, expression):
        """The value of an expression."""
        # The page's policy forbids eval; the debugger may.
        done = self.call('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in done, done['exceptionDetails']
        return done['result'].get('value')

    def press(self, *keys):
        """Presses keys by name, one after another."""
        for key in keys:
            named = {'Enter': (13, '\r'), ' ': (32, ' '), 'Tab': (9, ''), 'ArrowLeft': (37, ''), 'ArrowUp': (38, '')}
            named |= {'ArrowRight': (39, ''), 'ArrowDown': (40, ''), 'Home': (36, ''), 'End': (35, '')}
            code, text = named.get(key, (ord(key[0].upper()), key))
            for kind in ('keyDown', 'keyUp'):
                more = {'text': text} if text and kind == 'keyDown' else {}
                self.call('Input.dispatchKeyEvent', type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def picture(self, path: Path, *, whole: bool = False):
        """Writes a screenshot."""
        data = self.call('Page.captureScreenshot', captureBeyondViewport=whole)['data']
        Path(path).write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def chromium(directory: Path):
    """A page of a browser whose profile is in a directory."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = '--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking'
    # The browser speaks on 3 and 4.
    command = f'exec chromium {flags} --remote-debugging-pipe --user-data-dir="$0" 3<&{to_browser} 4>&{from_browser}'
    with open(directory / 'chromium.log', 'wb') as log:
        browser = subprocess.Popen(
            ['bash', '-c', command, str(directory / 'profile')],
            pass_fds=(to_browser, from_browser),
            stdout=log,
            stderr=log,
        )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(write, read)
    finally:
        os.close(write)
        os.close(read)
        browser.terminate()
        browser.wait(PATIENCE)
