// An action whose first attempt fails; the second one succeeds.
const { ServiceBroker } = require("moleculer");

const arrivals = [];
let began;

const broker = new ServiceBroker({ logger: { type: "Console", options: { level: "error", colors: false } } });
broker.createService({
  name: "mail",
  mixins: [queues],
  actions: {
    send: {
      queue: { ...queue, retry: { ...queue.retry, delay: DELAY_MS } },
      params: {},
      handler() {
        arrivals.push([arrivals.length ? "later" : "now", Date.now() - began]);
        if (arrivals.length === 1) throw new Error("the first attempt fails");
        console.log(JSON.stringify(arrivals));
        process.exit(0);
      },
    },
  },
});
broker.start().then(() => {
  console.log("ready");
  process.stdin.once("data", () => {
    began = Date.now();
    broker.call("mail.send.async", { params: {} });
  });
});
