/* Browsers start no worker for a page that was opened from a disk. The search of the site then runs in a hidden frame instead.
   mkdocs.yml lists this script among the theme's polyfills; otherwise the plugin "offline" would load one from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const script = document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      frame.hidden = true;
      frame.srcdoc = `<!doctype html><body>${script.outerHTML}</body>`;
      this.frame = frame;
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve();
        });
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
