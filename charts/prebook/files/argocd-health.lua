-- Argo CD health of a DisaggregatedModel (resource.customizations.health.prebook.dev_DisaggregatedModel).
--   Suspended:   a person paused the rollout, or scaled the model to zero
--   Healthy:     Ready for the current generation
--   Degraded:    Stalled: it will not get better without a change by a person
--   Progressing: everything else
local health = { status = "Progressing", message = "Waiting for the Prebook operator" }

if obj.status == nil or obj.status.conditions == nil then
  return health
end

local generation = obj.metadata.generation
local conditions = {}
for _, condition in ipairs(obj.status.conditions) do
  -- A condition of an older spec says nothing about this one.
  if generation == nil or condition.observedGeneration == nil or condition.observedGeneration == generation then
    conditions[condition.type] = condition
  end
end

local stalled, ready, reconciling = conditions["Stalled"], conditions["Ready"], conditions["Reconciling"]

if stalled ~= nil and stalled.status == "True" then
  health.status = "Degraded"
  health.message = stalled.reason .. ": " .. stalled.message
  return health
end

if obj.status.observedGeneration ~= nil and generation ~= nil and obj.status.observedGeneration < generation then
  return health
end

if ready ~= nil then
  health.message = ready.message
  if ready.reason ~= nil and ready.reason ~= "" then
    health.message = ready.reason .. ": " .. ready.message
  end
  if ready.reason == "ScaledToZero" or ready.reason == "Paused" then
    health.status = "Suspended"
  elseif ready.status == "True" and (reconciling == nil or reconciling.status ~= "True") then
    health.status = "Healthy"
  end
end

return health
