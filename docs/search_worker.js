// Search runs in a worker, and browsers start none for pages that are opened as files. There, a hidden frame stands in.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.answer(data) // what the script calls to answer
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => run(inside, each)))
      this.inside = inside
      this.ready = run(inside, url)
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.onmessage?.(event)
      this.dispatchEvent(event)
    }

    postMessage(data) {
      this.ready.then(() => {
        const event = new this.inside.MessageEvent("message", { data })
        this.inside.onmessage?.(event)
        this.inside.dispatchEvent(event)
      })
    }
  }

  function run(inside, url) {
    return new Promise((done, failed) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = done
      script.onerror = failed
      inside.document.documentElement.append(script)
    })
  }
}
