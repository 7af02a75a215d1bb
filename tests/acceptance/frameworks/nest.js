// An application that publishes to itself.
require("reflect-metadata");
const { Injectable, Module } = require("@nestjs/common");
const { NestFactory } = require("@nestjs/core");
const { AmqpConnection, RabbitSubscribe } = require("@golevelup/nestjs-rabbitmq");

const arrivals = [];
let began;

class Reminders {
  remind(order) {
    arrivals.push([order.name, Date.now() - began]);
    if (arrivals.length === 2) end();
  }
}
Injectable()(Reminders);
const method = Object.getOwnPropertyDescriptor(Reminders.prototype, "remind");
RabbitSubscribe({ exchange: "orders", routingKey: "order.*", queue: "reminders" })(Reminders.prototype, "remind", method);

class App {}
Module({ imports: [rabbit], providers: [Reminders] })(App);

async function end() {
  console.log(JSON.stringify(arrivals));
  await app.close();
  process.exit(0);
}

let app;
(async () => {
  app = await NestFactory.createApplicationContext(App, { logger: ["error", "warn"] });
  const amqp = app.get(AmqpConnection);
  console.log("ready");
  process.stdin.once("data", async () => {
    began = Date.now();
    await remind(amqp, { name: "later" }, DELAY_MS);
    await amqp.publish("orders", "order.remind", { name: "now" });
  });
})();
